"""OLMo 2: Llama's decoder with norms only after attention and MLP, and norms across all query and
all key heads."""

from __future__ import annotations

from hybridflow.models.blocks import Block, DenseMlp, GroupedAttention, Norms
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Olmo2(Decoder):
    """Parameter map of an `olmo2` config."""

    architecture = "Olmo2ForCausalLM"
    positions = 2048
    qk_norm = True
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": None, "rms_norm_eps": 1e-5},
        fixed={"attention_bias": (False,)},
    )

    def attention(self, layer: int) -> Block:
        """Return attention with norms across all heads and a norm on its output."""
        return GroupedAttention(
            self.hidden,
            self.heads,
            self.groups,
            self.head_dim,
            qk_norm=True,
            wide_norm=True,
            norms=Norms("", "post_attention_layernorm"),
        )

    def mlp(self, layer: int) -> Block:
        """Return a gated MLP with a norm on its output."""
        norms = Norms("", "post_feedforward_layernorm")
        return DenseMlp(self.hidden, int(self.values["intermediate_size"]), norms=norms)


FAMILIES.register("olmo2", Olmo2)
