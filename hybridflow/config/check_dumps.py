"""Runs that only generate, and runs that train on dumps of rollouts. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig


def problems(config: RunConfig) -> Iterator[str]:
    """Every problem as one line."""
    trainer = config.trainer
    if trainer.rollout_only and not trainer.dump_rollouts_every_steps:
        yield (
            "trainer.rollout_only=true with trainer.dump_rollouts_every_steps=0 keeps nothing of what it generates; "
            "set dump_rollouts_every_steps=1"
        )
    if config.data.answers != "sampled" and (trainer.rollout_only or trainer.rollouts_from is not None):
        yield (
            f"data.answers={config.data.answers} generates nothing, and trainer.rollout_only and rollouts_from are "
            "about what is generated; leave them out, or set data.answers=sampled"
        )
    if trainer.rollouts_from is None:
        return
    source = f"trainer.rollouts_from={trainer.rollouts_from}"
    if trainer.rollout_only:
        yield f"{source} trains without generating, and trainer.rollout_only=true does not train; leave one out"
    if not Path(trainer.rollouts_from).exists():
        yield f"{source}: no such folder or file; give the rollouts/ of a run, or one step_NNNNNN.parquet in it"
    if derived.needs_engine_routes(config):
        yield (
            f"actor.router_replay={config.actor.router_replay} needs the experts that the engine used, which dumps do "
            f"not hold ({source}); set it to none or r2"
        )
