"""Rotary embeddings with a family's own frequencies, for types that Megatron's settings cannot
express."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from hybridflow.device.platform import Platform
from hybridflow.mcore.torch_functions import rotate_unfused
from hybridflow.models.rotary import Rotary


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding with given frequencies.

    Latent attention takes the factor of cosines and sines from this module's result
    (multi_latent_attention.py:564), grouped-query attention from the config (attention.py:1102,
    `set_attention_factor`).
    """

    def __init__(self, rotary: Rotary, config: TransformerConfig) -> None:
        is_on_cpu = bool(config.use_cpu_initialization)
        super().__init__(
            rotary.dim, 1.0, rotary_base=rotary.theta, use_cpu_initialization=is_on_cpu
        )
        platform = Platform("cpu") if is_on_cpu else Platform.detect()
        self.inv_freq = rotary.frequencies().to(platform.current_device())
        self.factor = rotary.attention_factor if config.multi_latent_attention else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the angles [s, 1, 1, dim] of positions 0 to s - 1.

        For latent attention, also returns the factor of their cosines.
        """
        angles: torch.Tensor = super().forward(*args, **kwargs)
        return angles if self.factor is None else (angles, self.factor)


def install() -> None:
    """Replace Megatron's unfused rotation of packed sequences with one that does not wait for their
    lengths.

    Idempotent.

    Latent attention, and any rotary type with a factor of cosines and sines, uses it with and
    without Transformer Engine.
    """
    rope_utils._apply_rotary_pos_emb_thd = rotate_unfused


def set_attention_factor(config: TransformerConfig, rotary: Rotary) -> None:
    """Configure grouped-query attention to multiply cosines and sines by the factor.

    Megatron computes 0.1 * mscale * ln(scaling factor) + 1 from these attributes; with a scaling
    factor of e this equals the attention factor.
    """
    if rotary.attention_factor != 1.0:
        vars(config).update(
            yarn_rotary_scaling_factor=math.e,
            yarn_mscale=10.0 * (rotary.attention_factor - 1.0),
            yarn_mscale_all_dim=0.0,
        )


def use_frequencies(model: torch.nn.Module, config: TransformerConfig, rotary: Rotary) -> None:
    """Replace the rotary modules of a model, including those of its latent attention layers."""
    for module in list(model.modules()):
        if isinstance(getattr(module, "rotary_pos_emb", None), RotaryEmbedding):
            module.rotary_pos_emb = ScaledRotaryEmbedding(rotary, config)
