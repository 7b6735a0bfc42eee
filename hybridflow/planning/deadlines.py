"""Start-up deadlines of a run: the configured timeouts, plus an allowance that depends on the
number of ranks and bytes.

These are deadlines, not estimates. They assume a slow disk and a busy cluster, so that only a start
that hangs is aborted, not a slow one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.models import family_of

# seconds per process beyond the first node's, to start it and import its libraries from a shared
# disk
_RANK_S = 0.5
_NODE_RANKS = 8
_READ_BYTES_S = 2e8  # bytes per second and node from such a disk
_ENGINE_RANK_S = 10.0  # per engine rank beyond the first, for rendezvous and graph capture
_ENGINE_BYTES_S = 1e9  # bytes per second and rank to allocate, fill and lay out weights
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StartAllowance:
    """Seconds added to `cluster.start_timeout_s` (first two) and `rollout.start_timeout_s` (last
    two).

    Attributes:
        processes: for starting the processes of all roles.
        reading: for reading a node's share of all roles' weights.
        engine_ranks: for starting an engine's ranks.
        engine_bytes: for allocating and filling an engine rank's weights.
    """

    processes: float
    reading: float
    engine_ranks: float
    engine_bytes: float

    @classmethod
    def of(cls, config: RunConfig, hf_config: Mapping[str, Any]) -> StartAllowance:
        """Compute the allowance for a run whose policy has this Hugging Face config."""
        tensors = family_of({"vocab_size": 1, **hf_config}).tensors()
        whole = sum(map(prod, tensors.values())) * _BYTES[config.model.dtype]
        roles = derived.roles_in_use(config)
        ranks = sum(
            derived.role_world_size(config, role) for role in roles if not _shares(config, role)
        )
        parallel = config.actor.parallel
        copy = max(
            derived.model_parallel_size(parallel), derived.expert_model_parallel_size(parallel)
        )
        share = min(1.0, config.cluster.procs_per_node / copy)
        read = whole * share * len(roles) if config.model.path is not None else 0.0
        engine = derived.engine_ranks(config) if derived.generates(config) else 1
        return cls(
            processes=_RANK_S * max(ranks - _NODE_RANKS, 0),
            reading=read / _READ_BYTES_S,
            engine_ranks=_ENGINE_RANK_S * (engine - 1),
            engine_bytes=whole / engine / _ENGINE_BYTES_S,
        )

    def applied(self, config: RunConfig) -> RunConfig:
        """Return a copy of the configuration with the effective deadlines."""
        cluster = config.cluster
        rollout = config.rollout
        ranks = cluster.start_timeout_s + self.processes + self.reading
        engines = rollout.start_timeout_s + self.engine_ranks + self.engine_bytes
        return replace(
            config,
            cluster=replace(cluster, start_timeout_s=round(ranks, 1)),
            rollout=replace(rollout, start_timeout_s=round(engines, 1)),
        )

    def describe(self, config: RunConfig) -> str:
        """Format the start-up deadlines for `--explain`."""
        applied = self.applied(config)
        return "\n".join(
            (
                "Start-up deadlines",
                (
                    f"  ranks   = cluster.start_timeout_s {config.cluster.start_timeout_s:g} + "
                    f"{self.processes:.0f} s for processes + {self.reading:.0f} s per node to "
                    f"read weights at {_READ_BYTES_S / 1e9:g} GB/s = "
                    f"{applied.cluster.start_timeout_s:.0f} s"
                ),
                (
                    f"  engines = rollout.start_timeout_s {config.rollout.start_timeout_s:g} + "
                    f"{self.engine_ranks:.0f} s for ranks + {self.engine_bytes:.0f} s for weights "
                    f"= {applied.rollout.start_timeout_s:.0f} s"
                ),
            )
        )


def _shares(config: RunConfig, role: str) -> bool:
    """Return True if a role runs in the policy's processes."""
    return role != "actor" and derived.is_colocated(config, role)
