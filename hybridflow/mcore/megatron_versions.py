"""What differs between Megatron-Core 0.16 and 0.19 for the families here, with and without Transformer Engine.

Differences of the modules without Transformer Engine are in `torch_modules`: its spec provider, and `install`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

# Megatron-Core from that version on: Transformer Engine from, and below. 0.16.1 asks for its range in its extra `dev`.
# 0.19.2 asks for no version in its extra `te`, and asks for newer features than 2.9's by version, up to 2.14; 2.20 is
# the newest that there is.
_TRANSFORMER_ENGINE = {"0.19": ("2.9", "2.21"), "0": ("2.9", "2.12")}


def transformer_engine_range(megatron: str) -> tuple[str, str]:
    """The versions of Transformer Engine for this version of Megatron-Core: from the first, and below the second."""
    return next(found for first, found in _TRANSFORMER_ENGINE.items() if Version(megatron) >= Version(first))


def install() -> None:
    """Keep latent attention's layers as 0.16 builds them. Idempotent."""
    if hasattr(MLASelfAttention, "_resolve_qk_norm_config"):
        MLASelfAttention._resolve_qk_norm_config = _norms_and_projections


def _norms_and_projections(attention: Any, submodules: Any) -> dict[str, Any]:
    """Without a query latent 0.19 puts the norm of queries into their projection (mla_qk_norm_config.py:151), which no
    family here has: `qk_layernorm` means the latents alone."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    found: dict[str, Any] = QKNormConfigResolver(attention.config, submodules).resolve()
    if attention.config.q_lora_rank is None:
        found["linear_q_proj"] = submodules.linear_q_proj
    return found
