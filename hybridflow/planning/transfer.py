"""Dry run of a configuration's weight sync, which is planned, proven and simulated without any
device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.models.fp8 import FP8
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard import report
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.simulate import Fabric

LINK_GBPS = 400.0  # per rank, one direction


def transfer_of(
    config: RunConfig, sizes: Mapping[str, Any], link_gbps: float = LINK_GBPS
) -> report.DryRun:
    """Dry-run the sync from a recipe's trainer to its engines.

    Args:
        sizes: the policy's config.json.

    Raises:
        ConfigError, ModelError, WeightSyncError: the model or the parallel sizes are not supported.
            The message includes the remedy.
    """
    rollout = config.rollout
    trainer = ParallelShape.of(config.actor.parallel, derived.world_size(config))
    engine = EngineShape(
        rollout.tensor,
        rollout.expert,
        rollout.data_parallel_attention,
        rollout.pipeline,
        rollout.num_engines,
    )
    return dry_run(
        sizes,
        trainer,
        [engine],
        (config.model.dtype, rollout.quantization),
        rollout.sync.staging_bytes,
        link_gbps,
    )


def dry_run(
    sizes: Mapping[str, Any],
    trainer: ParallelShape,
    engines: Sequence[EngineShape],
    dtypes: tuple[str, str | None],
    staging_bytes: int,
    link_gbps: float,
) -> report.DryRun:
    """Call `report.dry_run` with values from a configuration.

    Args:
        dtypes: (dtype of the trainer's weights, dtype of the engines' weights or None if it is the
            same). "fp8" is block-wise.
    """
    engine_dtype = FP8 if dtypes[1] == "fp8" else dtypes[1]
    return report.dry_run(
        sizes, trainer, engines, dtypes[0], staging_bytes, Fabric(link_gbps=link_gbps), engine_dtype
    )
