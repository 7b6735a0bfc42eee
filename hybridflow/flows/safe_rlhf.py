"""Safe RLHF (arXiv 2310.12773): maximises the reward while the mean cost stays within a limit. Uses
separate critics for rewards and costs, and a Lagrange multiplier that grows while the cost is above
the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.keys import NonNegative, Positive
from hybridflow.errors import ConfigError
from hybridflow.flows.base import Run, flow
from hybridflow.rewards.verifiers.base import finite_number

_LEAST = math.log(1e-8)  # of the multiplier's logarithm; from 0 it would not grow again
_ROLES = ("policy", "critic", "cost_critic", "reference", "reward_model")


@dataclass(frozen=True)
class Options:
    """Options: `limit`, the upper limit of the mean cost (-d in the paper); `multiplier`, the
    initial Lagrange multiplier; `lr`, the step size of its updates; and `largest`, its upper bound.
    """

    limit: float = 0.0
    multiplier: Positive = 1.0
    lr: NonNegative = 0.1
    largest: Positive = 5.0

    def __post_init__(self) -> None:
        """Raise ConfigError if the initial multiplier is above its upper bound."""
        if self.multiplier > self.largest:
            raise ConfigError(
                f"algorithm.flow_options.multiplier={self.multiplier:g} is more than "
                f"largest={self.largest:g}; reduce it, or raise largest"
            )


@flow("safe_rlhf", roles=_ROLES, options=Options, rewards=("cost",))
async def safe_rlhf(run: Run) -> None:
    """Run PPO on the reward advantages minus the weighted cost advantages (section 3.3, appendix
    B.3).
    """
    options = run.options
    async for _ in run.steps():
        batch = await run.samples()
        costs = costs_of(batch)
        batch = batch.with_columns(costs=np.nan_to_num(costs))
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.critic.values(batch),
            run.cost_critic.values(batch),
        )
        batch = run.advantages(run.advantages(batch), of="costs")
        multiplier = run.state.get("multiplier", options.multiplier)
        batch = batch.with_columns(advantages=constrained(batch, multiplier))
        cost = float(np.nanmean(costs))
        run.state["multiplier"] = next_multiplier(multiplier, cost, options)
        run.record(cost=cost, multiplier=multiplier)
        run.later(run.critic.update(batch))
        run.later(run.cost_critic.update(batch))
        await run.policy.update(batch)
        await run.sync()


def costs_of(batch: DataProto) -> np.ndarray:
    """Return each row's `cost`, as returned by the reward function, [B] f32; NaN for rows whose
    scoring failed.
    """
    found = [finite_number(extra.get("cost")) for extra in batch["reward_extra"]]
    return np.array([math.nan if cost is None else cost for cost in found], np.float32)


def constrained(batch: DataProto, multiplier: float) -> Jagged:
    """Return the advantages of the Lagrangian, divided by 1 + multiplier (eq. 30), at each response
    token.
    """
    rewards = batch.jagged("advantages")
    costs = batch.jagged("cost_advantages")
    values = (rewards.values - multiplier * costs.values) / (1.0 + multiplier)
    return Jagged(values.astype(np.float32), rewards.offsets)


def next_multiplier(multiplier: float, cost: float, options: Options) -> float:
    """Apply gradient ascent to the logarithm of the multiplier (eq. 31). The step's mean cost is
    used as the estimate of J_C.
    """
    logarithm = math.log(multiplier) + options.lr * multiplier * (cost - options.limit)
    return math.exp(min(max(logarithm, _LEAST), math.log(options.largest)))
