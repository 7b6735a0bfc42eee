"""How long the start of a run may take: what the keys say, and what its ranks and bytes add to
that.

These are deadlines and not estimates: rates are those of a slow disk and of a busy cluster, so that
a start that goes on is not ended, and one that hangs is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.models import family_of

# to start a process and import its libraries from a disk that all nodes share, for each beyond a
# node's
_RANK_S = 0.5
_NODE_RANKS = 8
_READ_BYTES_S = 2e8  # of a node, from such a disk
_ENGINE_RANK_S = 10.0  # to meet, and to record graphs, for each rank of an engine beyond the first
_ENGINE_BYTES_S = 1e9  # of a rank: allocated, filled and laid out
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StartAllowance:
    """Seconds beyond `cluster.start_timeout_s` and `rollout.start_timeout_s`.

    Attributes:
        processes: for the processes of all roles together.
        reading: for a node to read its share of the weights of all roles.
        engine_ranks: for the ranks of an engine.
        engine_bytes: for a rank of an engine to make room for its weights.
    """

    processes: float
    reading: float
    engine_ranks: float
    engine_bytes: float

    @classmethod
    def of(cls, config: RunConfig, hf_config: Mapping[str, Any]) -> StartAllowance:
        """The allowance of a run whose policy has this config."""
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
        """The configuration with the deadlines that count."""
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
        """How long the start may take, as lines of `--explain`."""
        applied = self.applied(config)
        return "\n".join(
            (
                "Deadlines of the start",
                (
                    f"  ranks   = cluster.start_timeout_s {config.cluster.start_timeout_s:g} + "
                    f"{self.processes:.0f} s for processes + {self.reading:.0f} s for a node to "
                    f"read its weights at {_READ_BYTES_S / 1e9:g} GB/s = "
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
    """Whether a role lives in the processes of the policy."""
    return role != "actor" and derived.is_colocated(config, role)
