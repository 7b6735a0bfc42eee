"""Checks of the training loop's settings: training on tokens from stale weights, generation without
training, and training on rollout dumps. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig


def staleness_problems(config: RunConfig) -> Iterator[str]:
    """Check that the other settings are compatible with `trainer.max_staleness`."""
    if (ahead := config.trainer.steps_ahead) is not None and ahead > config.trainer.max_staleness:
        yield (
            f"trainer.steps_ahead={ahead} must be at most "
            f"trainer.max_staleness={config.trainer.max_staleness}: answers would otherwise be "
            "older than allowed; reduce it, or set it to null"
        )
    if not config.trainer.max_staleness:
        return
    stale = f"trainer.max_staleness={config.trainer.max_staleness}"
    if config.trainer.tail_batching:
        yield (
            f"{stale} trains while long answers are still in flight, but "
            f"trainer.tail_batching={config.trainer.tail_batching} cuts them off and regenerates "
            "them; set one of the two to 0"
        )
    actor = config.actor
    rollout = config.rollout
    correction = actor.rollout_correction
    if correction.weight == "none" and not correction.reject and actor.old_log_probs != "engine":
        yield (
            f"{stale} trains on tokens sampled with older weights, without correction; choose "
            "algorithm=grpo-async, or set actor.rollout_correction.weight=token or "
            "actor.old_log_probs=engine (docs/asynchronous.md)"
        )
    if rollout.sleep_while_training:
        yield (
            f"{stale} keeps engines running while the policy trains, but "
            "rollout.sleep_while_training=true stops them; give the engines separate devices "
            "(rollout.pool=null) and set it to false, or set max_staleness to 0"
        )
    if rollout.sync.pause == "abort":
        yield (
            f"{stale} has requests in flight when weights arrive, but rollout.sync.pause=abort "
            "ends them; set it to retract or in_place"
        )
    if rollout.sync.pause == "in_place" and rollout.logprob_diff_bound is not None:
        yield (
            f"{stale} with rollout.sync.pause=in_place computes tokens from a KV cache of older "
            "weights, so their log-probabilities differ by design; set "
            "rollout.logprob_diff_bound=null, or pause=retract"
        )


def length_problems(config: RunConfig) -> Iterator[str]:
    """Check that the run length is set by only one key."""
    steps = config.trainer.total_steps
    epochs = config.trainer.total_epochs
    if steps is not None and epochs is not None:
        yield (
            f"trainer.total_steps={steps} and trainer.total_epochs={epochs} both set the run's "
            "length; set trainer.total_steps=null to count epochs, or trainer.total_epochs=null"
        )


def profile_problems(config: RunConfig) -> Iterator[str]:
    """Check that the profiled ranks exist."""
    ranks = derived.role_world_size(config, "actor")
    for rank in config.trainer.profile.ranks:
        if config.trainer.profile.steps and rank >= ranks:
            yield (
                f"trainer.profile.ranks contains {rank}, but the actor has {ranks} ranks, numbered "
                "from 0"
            )


def _retention_problems(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    kept = trainer.keep_rollout_steps
    if kept is None:
        if trainer.keep_rollouts_every_steps:
            yield (
                f"trainer.keep_rollouts_every_steps={trainer.keep_rollouts_every_steps} has no "
                "effect while trainer.keep_rollout_steps=null keeps all dumps; set "
                "keep_rollout_steps as well"
            )
    elif not trainer.dump_rollouts_every_steps:
        yield (
            f"trainer.keep_rollout_steps={kept} has no effect with "
            "trainer.dump_rollouts_every_steps=0, because no dumps are written; remove one of the "
            "two"
        )
    elif trainer.rollout_only:
        yield (
            f"trainer.keep_rollout_steps={kept} would delete rollouts that "
            "trainer.rollout_only=true generates; set it to null"
        )


def dump_problems(config: RunConfig) -> Iterator[str]:
    """Check runs that only generate and runs that train on rollout dumps."""
    trainer = config.trainer
    if trainer.rollout_only and not trainer.dump_rollouts_every_steps:
        yield (
            "trainer.rollout_only=true with trainer.dump_rollouts_every_steps=0 would discard "
            "everything it generates; set dump_rollouts_every_steps=1"
        )
    yield from _retention_problems(config)
    if config.data.answers != "sampled" and (
        trainer.rollout_only or trainer.rollouts_from is not None
    ):
        yield (
            f"data.answers={config.data.answers} generates nothing, but trainer.rollout_only and "
            "rollouts_from apply to generated answers; remove them, or set data.answers=sampled"
        )
    if trainer.rollouts_from is None:
        return
    source = f"trainer.rollouts_from={trainer.rollouts_from}"
    if trainer.rollout_only:
        yield (
            f"{source} trains without generating, but trainer.rollout_only=true does not train; "
            "remove one of the two"
        )
    if not Path(trainer.rollouts_from).exists():
        yield (
            f"{source}: file or folder not found; set the rollouts/ folder of a run, or one "
            "step_NNNNNN.parquet in it"
        )
    if derived.needs_engine_routes(config):
        yield (
            f"actor.router_replay={config.actor.router_replay} requires the experts that the "
            f"engine used, but dumps do not contain them ({source}); set it to none or r2"
        )
