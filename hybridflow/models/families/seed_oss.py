"""Seed-OSS: Llama's decoder with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields

# published configs contain the dropout of pretraining; log-probs and gradients are computed without
# dropout
_DROPOUT = (0.1, 0.0)


class SeedOss(Decoder):
    """Parameter map of a `seed_oss` config."""

    architecture = "SeedOssForCausalLM"
    positions = 524288
    fields = Fields(
        used={
            "intermediate_size": REQUIRED,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_bias": True,
        },
        fixed={
            "attention_out_bias": (False,),
            "mlp_bias": (False,),
            "attention_dropout": _DROPOUT,
            "residual_dropout": _DROPOUT,
        },
        unused=frozenset({"pretraining_tp"}),
        nullable=frozenset({"num_key_value_heads"}),
    )

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        super().__init__(hf, mtp)
        self.qkv_bias = bool(self.values["attention_bias"])


FAMILIES.register("seed_oss", SeedOss)
