"""Export of the policy to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.mcore.parallel import all_coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.saving.hf_export import MAX_SHARD_BYTES, Held, export_held
from hybridflow.saving.ownership import megatron_owners


def export(
    policy: Policy,
    folder: Path,
    hf_config: Mapping[str, Any],
    tokenizer: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    source: Path | None = None,
) -> list[str]:
    """Export the policy's weights to a Hugging Face folder (`export_held`), with adapters merged.
    Collective."""
    held = Held(
        policy.family,
        policy.dtype,
        megatron_owners(policy.family, all_coordinates()),
        policy.parameters(),
    )
    try:
        return export_held(held, folder, hf_config, tokenizer, max_shard_bytes, source=source)
    finally:
        policy.release_copies()
