"""Llama 3: grouped-query attention, SwiGLU."""

from __future__ import annotations

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Llama(Decoder):
    """The map for a `llama` config."""

    architecture = "LlamaForCausalLM"
    positions = 2048
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": None},
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        unused=frozenset({"pretraining_tp"}),
    )

    def attention(self, layer: int) -> Block:
        """Grouped queries without biases."""
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim)

    def mlp(self, layer: int) -> Block:
        """A gated MLP."""
        return DenseMlp(self.hidden, int(self.values["intermediate_size"]))


FAMILIES.register("llama", Llama)
