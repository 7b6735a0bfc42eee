"""Llama 3: grouped-query attention and SwiGLU."""

from __future__ import annotations

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Llama(Decoder):
    """Parameter map of a `llama` config."""

    architecture = "LlamaForCausalLM"
    positions = 2048
    fields = Fields(
        used={"intermediate_size": REQUIRED, "head_dim": None},
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        unused=frozenset({"pretraining_tp"}),
    )


FAMILIES.register("llama", Llama)
