"""Handling of differences between Megatron-Core 0.16 and 0.19 that affect the supported families,
with or without Transformer Engine. Differences that affect only the modules used without
Transformer Engine are handled in `torch_modules` (its spec provider and `install`).
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

# First version of Megatron-Core: range of Transformer Engine, upper bound exclusive. 0.16.1
# declares its range in its extra `dev`. 0.19.2 declares no version in its extra `te`, and enables
# features newer than 2.9 depending on the version, up to 2.14; 2.20 is the latest release.
_TRANSFORMER_ENGINE = {"0.19": ("2.9", "2.21"), "0": ("2.9", "2.12")}


def transformer_engine_range(megatron: str) -> tuple[str, str]:
    """Return the range of Transformer Engine versions that this Megatron-Core version supports.

    The first version is inclusive, the second exclusive.
    """
    return next(
        found for first, found in _TRANSFORMER_ENGINE.items() if Version(megatron) >= Version(first)
    )


def install() -> None:
    """Make Megatron build latent-attention layers as version 0.16 does. Idempotent."""
    if hasattr(MLASelfAttention, "_resolve_qk_norm_config"):
        MLASelfAttention._resolve_qk_norm_config = _norms_and_projections


def _norms_and_projections(attention: Any, submodules: Any) -> dict[str, Any]:
    """Revert a Megatron-Core 0.19 change that adds a norm to the query projection if there is no
    query latent (mla_qk_norm_config.py:151).

    No supported family has that norm; `qk_layernorm` refers only to the latents.
    """
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    found: dict[str, Any] = QKNormConfigResolver(attention.config, submodules).resolve()
    if attention.config.q_lora_rank is None:
        found["linear_q_proj"] = submodules.linear_q_proj
    return found
