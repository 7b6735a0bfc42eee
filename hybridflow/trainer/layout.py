"""One-line description of a run's layout, for its summary and messages."""

from __future__ import annotations

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig


def layout_text(config: RunConfig) -> str:
    """Describe the trainer and the engines by their parallel sizes: `TP2·PP2·EP2·DP1·SP →
    2×TP1`."""
    parallel = config.actor.parallel
    parts = [
        f"TP{parallel.tensor}",
        f"PP{parallel.pipeline}",
        f"EP{parallel.expert}",
        f"DP{derived.data_parallel_size(config)}",
    ]
    if config.actor.backend == "fsdp":
        parts = [f"FSDP{derived.world_size(config)}"]
    if parallel.sequence:
        parts.append("SP")
    rollout = config.rollout
    engine = [f"TP{rollout.tensor}"]
    sizes = (
        ("PP", rollout.pipeline),
        ("EP", rollout.expert),
        ("DPA", rollout.data_parallel_attention),
    )
    engine += [f"{short}{size}" for short, size in sizes if size > 1]
    if rollout.nodes_per_engine > 1:
        engine.append(f"{rollout.nodes_per_engine} nodes")
    return "·".join(parts) + f" → {rollout.num_engines}×" + "·".join(engine)
