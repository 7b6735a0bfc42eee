"""GiGPO: compares whole multi-turn answers, and compares each turn with other turns that started in
the same state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from hybridflow.algorithms.estimators.base import Estimate, Samples, estimator, rows_of_tokens
from hybridflow.algorithms.estimators.grpo import GrpoOptions, grpo_advantages
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class GigpoOptions(GrpoOptions):
    """Options, in addition to GRPO's: `gamma`, the discount per turn, and `step_weight`, the weight
    of the turn comparison relative to the comparison of whole answers."""

    gamma: float = 1.0
    step_weight: float = 1.0


@estimator(
    "gigpo", reads=("response_ids",), compares_samples=True, options=GigpoOptions, takes_parts=True
)
def gigpo(samples: Samples, options: GigpoOptions) -> Estimate:
    """Compute A_E + step_weight A_S at each token of a turn (arXiv 2505.10978, section 4). A_E
    compares the answers to a prompt by the sum of their turn rewards. A_S compares the discounted
    rewards from a turn onwards with those of turns in the same answers that started in the same
    state: at the beginning, or after the same tokens from a tool or environment. A_S is 0 for a
    turn whose state occurs only once.

    Raises:
        ConfigError: no sample has turn rewards.
    """
    ends = samples.part_ends
    given = samples.part_rewards
    if ends is None or given is None:
        raise ConfigError(
            "algorithm.adv_estimator=gigpo requires a reward for each turn; return turn_rewards (a "
            "list of numbers) with the score, or set rollout.agent.loop=environment"
        )
    mask = samples.mask
    number = int(ends.sum())
    norm = options.norm_adv_by_std
    row = rows_of_tokens(samples.lengths)
    # turn of each sampled token; tokens after a sample's last turn are not sampled
    part = ends.cumsum(0) - ends.long()
    parts = given.new_zeros(number + 1).index_add_(0, part, given)[:number]
    part_row = row[ends]
    totals = parts.new_zeros(len(samples.lengths)).index_add_(0, part_row, parts)
    whole = grpo_advantages(totals, samples.groups, norm_by_std=norm)[row]
    to_go = _discounted(parts.tolist(), part_row.tolist(), options.gamma)
    states = row.new_tensor(_states(samples))
    has_others = states.bincount()[states] > 1
    steps = grpo_advantages(parts.new_tensor(to_go), states, norm_by_std=norm)
    steps = steps.where(has_others, 0.0)
    of_tokens = parts.new_zeros(len(row))
    of_tokens[mask] = steps[part[mask]]
    advantages = whole + options.step_weight * of_tokens
    return advantages.where(mask, 0.0), None


def _discounted(rewards: list[float], rows: list[int], gamma: float) -> list[float]:
    """Return, for each turn, the discounted sum of its reward and the rewards of all later turns in
    its row."""
    found = list(rewards)
    for turn in range(len(rewards) - 2, -1, -1):
        if rows[turn] == rows[turn + 1]:
            found[turn] += gamma * found[turn + 1]
    return found


def _states(samples: Samples) -> list[int]:
    """Return the index of the state in which each turn started. It is the same for turns that
    started after the same tokens in answers to the same prompt."""
    assert samples.part_ends is not None
    numbers: dict[tuple[object, ...], int] = {}
    found: list[int] = []
    columns = (samples.columns["response_ids"], samples.mask, samples.part_ends)
    tokens = zip(*(column.tolist() for column in columns), strict=True)
    for group, length in zip(samples.groups.tolist(), samples.lengths.tolist(), strict=True):
        # tokens since the last turn; None: a part continues directly after another
        shown: list[int] | None = []
        begun = False
        for token, sampled, last in islice(tokens, length):
            if not sampled:
                shown = [*(shown or []), token]
                continue
            if not begun:
                key = (group, *shown) if shown is not None else (group, None, len(found))
                found.append(numbers.setdefault(key, len(numbers)))
            begun = not last
            shown = None
    return found
