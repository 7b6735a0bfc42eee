"""Write the policy as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.mcore.parallel import all_coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.reshard.plan import OwnedPiece, plan_stages
from hybridflow.saving.hf_export import MAX_SHARD_BYTES, Held, export_held


def export(
    policy: Policy,
    folder: Path,
    hf_config: Mapping[str, Any],
    tokenizer: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the policy's weights, adapters merged, as `export_held` does. Collective."""
    held = Held(policy.family, policy.dtype, _owners(policy), policy.parameters())
    try:
        export_held(held, folder, hf_config, tokenizer, max_shard_bytes)
    finally:
        policy.release_copies()


def _owners(policy: Policy) -> dict[str, list[OwnedPiece]]:
    """{HF tensor: its slices, each with the one rank that sends it, by rank}."""
    found: dict[str, list[OwnedPiece]] = {}
    for plan in plan_stages(policy.family, all_coordinates(), 1 << 62, policy.dtype.itemsize):
        for bucket in plan.buckets:
            for owned in bucket.pieces:
                found.setdefault(owned.piece.source, []).append(owned)
    return found
