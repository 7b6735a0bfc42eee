"""Checks for settings that are not supported in a single-process job (`cluster.in_process`). Does
not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.config import derived
from hybridflow.config.keys import differing
from hybridflow.config.schema import RolloutConfig, RunConfig

_ENGINE = "hf"  # the built-in kind that copies weights directly
# must be 1: one engine with one rank, and one policy rank
_ONE = (
    *(
        "cluster.nodes",
        "cluster.procs_per_node",
        "rollout.num_engines",
        "rollout.tensor",
        "rollout.pipeline",
    ),
    *("rollout.expert", "rollout.data_parallel_attention", "rollout.nodes_per_engine"),
)
_WITHOUT_USE: Mapping[str, Any] = {
    "cluster.address": None,
    "rollout.extra_args": {},
    "rollout.quantization": None,
    "rollout.python": None,
    "rollout.sleep_while_training": False,
}


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each setting that a single-process job does not support."""
    if not config.cluster.in_process:
        if config.rollout.engine == _ENGINE:
            yield (
                f"rollout.engine={_ENGINE} runs only in the trainer's process; choose "
                "cluster=in-process, or another engine"
            )
        return
    here = "cluster.in_process=true"
    if config.rollout.engine == RolloutConfig().engine:
        yield (
            f"rollout.engine={config.rollout.engine} runs a server, which is not supported with "
            f"{here}; set it to {_ENGINE}"
        )
    for key, value, _ in differing(config, dict.fromkeys(_ONE, 1)):
        yield f"{key}={value} must be 1 with {here}: the job has one process"
    for key, value, wanted in differing(config, _WITHOUT_USE):
        yield f"{key}={value} is not supported with {here}; set it to {wanted}"
    if derived.needs_engine_routes(config):
        yield (
            f"actor.router_replay={config.actor.router_replay} requires the experts that the "
            f"engine used, but rollout.engine={_ENGINE} does not return them; set it to none or r2"
        )
    for role in derived.roles_in_use(config):
        if not derived.is_colocated(config, role):
            yield (
                f"{role}.placement=own requires more processes, but with {here} there is only one; "
                "set it to colocated"
            )
