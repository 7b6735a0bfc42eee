"""Plans for a run with several policies (`roles`), one plan per policy. Policies whose adapters
share the first policy's weights run on its devices, so each plan includes the memory that the other
policies occupy there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.planning.devices import Machines
from hybridflow.planning.job import Assumed, Job, job_of
from hybridflow.planning.plan import Plan, make_plan, resident

_FIRST = "policy"  # the name of the first policy


def make_plans(
    config: RunConfig,
    machines: Machines,
    assumed: Assumed,
    sizes_of: Callable[[RunConfig], Mapping[str, Any]],
) -> tuple[Plan, dict[str, Plan]]:
    """Return the first policy's plan of a step, and {name: plan} for the additional policies.

    Args:
        sizes_of: returns the Hugging Face config of a policy's model.

    Raises:
        ConfigError, ModelError: a model's folder or sizes are incomplete.
    """
    first = job_of(config, machines, assumed, sizes_of(config))
    further: dict[str, Job] = {}
    for name, own in config.roles.items():
        view = derived.policy_view(config, name)
        is_on_base = own.base is not None
        further[name] = job_of(view, machines, assumed, sizes_of(view), own.frozen, is_on_base)
    sharing = [name for name in further if config.roles[name].base]
    jobs = {_FIRST: first, **further}
    if sharing:
        sizes = {name: _adapters(jobs[name]) for name in (_FIRST, *sharing)}
        for name in sizes:
            others = {f"{one} adapters": size for one, size in sizes.items() if one != name}
            jobs[name] = replace(jobs[name], others=others)
    plans = {name: make_plan(job) for name, job in jobs.items()}
    return plans.pop(_FIRST), plans


def _adapters(job: Job) -> float:
    """Return the bytes that a policy's adapters, with their gradients and optimizer state unless
    offloaded, always occupy on its fullest device."""
    training = job.actor.training
    factors = max(map(training.trained_weights, range(training.cut.pipeline)))
    offload = job.actor.offload
    leaves = {"weights": True, "gradients": offload.gradients, "optimizer": offload.optimizer}
    parts = resident(job)["actor"]
    stays = [size for part, size in parts.items() if not leaves.get(part, False)]
    return (factors + sum(stays)) * job.constants.fragmentation
