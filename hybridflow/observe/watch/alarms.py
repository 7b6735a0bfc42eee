"""Alarms about the metrics of a run: signs that training is going wrong, each with possible
remedies.

`THRESHOLDS` contains all thresholds and the reason for each; docs/watching.md shows the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median

from hybridflow.observe.run_folder import RunFolder

WINDOW = 5  # steps whose mean is compared, so that one odd step is no alarm
BASELINE = 20  # steps before them, or the first steps


@dataclass(frozen=True)
class Threshold:
    """The threshold of an alarm, and the reason for its value."""

    value: float
    meaning: str
    reason: str


@dataclass(frozen=True)
class Alarm:
    """A raised alarm.

    Attributes:
        key: name of the alarm.
        metric: the metric to look at.
        step: the last step that was examined.
        text: a description of what was observed.
        advice: possible remedies, one sentence each.
        page: documentation page that lists the causes.
        samples: address of a search that shows affected samples.
    """

    key: str
    metric: str
    step: int
    text: str
    advice: tuple[str, ...]
    page: str
    samples: str = "rollouts"


THRESHOLDS = {
    "entropy": Threshold(
        0.2,
        "share of the first steps' entropy",
        "the score rises at the expense of entropy (arXiv 2505.22617), so little is left to gain; "
        "a fifth is our choice. No alarm while most prompts are solved",
    ),
    "policy_kl": Threshold(
        0.015,
        "nats between a step's first and last weights",
        "1.5 times the target of 0.01 at which OpenAI's Spinning Up stops the updates of a step",
    ),
    "jump": Threshold(
        5.0,
        "times the median of the previous 20 steps",
        "our choice: far above the noise between steps, so that a policy that always moves fast "
        "raises no alarm",
    ),
    "reference_kl": Threshold(
        0.05,
        "nats to the reference; a jump below this is ignored",
        "our choice: a new run starts at 0, so any later value would count as a jump",
    ),
    "solved": Threshold(
        0.8,
        "share of prompts",
        "their samples have no advantage (arXiv 2503.14476), so four fifths of the sampling is "
        "wasted; our choice",
    ),
    "unsolved": Threshold(0.8, "share of prompts", "the same"),
    "cut_off": Threshold(
        0.3,
        "share of responses at the length limit",
        "our choice: their final answer is missing, so most score 0 whether or not they were "
        "correct",
    ),
    "mismatch": Threshold(
        0.5,
        "share of `rollout.logprob_diff_bound`",
        "at the bound itself the run stops",
    ),
    "mismatch_rise": Threshold(
        5.0,
        "times the first steps' difference",
        "our choice; rounding differences do not grow over the steps",
    ),
    "mismatch_small": Threshold(
        1e-3,
        "nats; a rise below this is ignored",
        "the mean difference between kernels is about 1e-6 in float32 and 1e-2 in bfloat16",
    ),
    "ess": Threshold(
        0.5,
        "share of tokens",
        "half of the tokens carry no information about this policy (docs/tutorials/flat-reward.md)",
    ),
}


def alarms(run: RunFolder) -> list[Alarm]:
    """Return the alarms that the latest steps of a run raise."""
    return list(chain.from_iterable(rule(run) for rule in RULES))


def _entropy(run: RunFolder) -> Iterator[Alarm]:
    name = "actor/entropy"
    steps, values = _values(run, name)
    solved = run.values("train", "critic/solved_groups")[-WINDOW:]
    if len(values) < 2 * WINDOW or (solved and fmean(solved) > 0.5):
        return
    first = fmean(values[:WINDOW])
    last = fmean(values[-WINDOW:])
    share = THRESHOLDS["entropy"].value
    if first > 0 and last < share * first:
        yield Alarm(
            "entropy falls",
            name,
            steps[-1],
            f"The entropy has fallen from {first:.3g} to {last:.3g} nats.",
            (
                "actor.clip_ratio_high above actor.clip_ratio_low keeps rare tokens (DAPO)",
                "raise actor.entropy_coef, or lower actor.optim.lr",
                "look at the samples: does the policy always give one answer?",
            ),
            "tutorials/flat-reward.md#4-does-the-policy-move",
        )


def _policy_kl(run: RunFolder) -> Iterator[Alarm]:
    name = "actor/ppo_kl"
    steps, values = _values(run, name)
    sizes = list(map(abs, values))
    usual = median(sizes[-1 - BASELINE : -1]) if len(sizes) > WINDOW else None
    if usual is None:
        return
    limit = max(THRESHOLDS["policy_kl"].value, THRESHOLDS["jump"].value * usual)
    if sizes[-1] > limit:
        yield Alarm(
            "KL jumps",
            name,
            steps[-1],
            f"The updates of step {steps[-1]} moved the policy by {sizes[-1]:.3g} nats (usually "
            f"{usual:.3g}).",
            (
                "lower actor.optim.lr or actor.optim.clip_grad",
                "fewer updates per step: a larger actor.ppo_mini_batch_size",
                "hybridflow replay RUN STEP KEY=VALUE repeats the step with another setting",
            ),
            "tutorials/flat-reward.md#4-does-the-policy-move",
        )


def _reference_kl(run: RunFolder) -> Iterator[Alarm]:
    name = "actor/ref_kl"
    steps, values = _values(run, name)
    if len(values) < 2 * WINDOW:
        return
    usual = median(values[-WINDOW - BASELINE : -WINDOW])
    last = fmean(values[-WINDOW:])
    if last > max(THRESHOLDS["reference_kl"].value, THRESHOLDS["jump"].value * usual):
        yield Alarm(
            "KL jumps",
            name,
            steps[-1],
            f"The distance to the reference has risen from {usual:.3g} to {last:.3g} nats.",
            (
                "raise actor.kl_loss_coef, or lower actor.optim.lr",
                "look at the samples: is the reward earned in an unintended way?",
            ),
            "tutorials/flat-reward.md#4-does-the-policy-move",
        )


def _groups(run: RunFolder) -> Iterator[Alarm]:
    replace = "algorithm.dynamic_sampling=10 replaces such groups"
    for key, title, name, seen, advice in (
        (
            "solved",
            "groups all solved",
            "critic/solved_groups",
            "solves every sample",
            ("harder rows in data.train_files", replace, "nothing, if this is the goal"),
        ),
        (
            "unsolved",
            "groups all failed",
            "critic/unsolved_groups",
            "solves no sample",
            (
                "easier rows (data.difficulty_key), or partial credit in the reward",
                "a warm start (sft), or more samples per prompt (rollout.n)",
                replace,
            ),
        ),
    ):
        steps, values = _values(run, name)
        if len(values) >= WINDOW and (last := fmean(values[-WINDOW:])) >= THRESHOLDS[key].value:
            yield Alarm(
                title,
                name,
                steps[-1],
                f"For {last:.0%} of the prompts, the policy {seen}, so they yield no gradient.",
                advice,
                "tutorials/flat-reward.md#3-is-there-a-difference-within-the-groups",
                f"rollouts?group={key}",
            )


def _cut_off(run: RunFolder) -> Iterator[Alarm]:
    name = "response_length/clip_ratio"
    steps, values = _values(run, name)
    if len(values) >= WINDOW and (last := fmean(values[-WINDOW:])) >= THRESHOLDS["cut_off"].value:
        limit = run.setting("data.max_response_length")
        yield Alarm(
            "length at the limit",
            name,
            steps[-1],
            f"{last:.0%} of the responses were cut off"
            + (f" at data.max_response_length={limit}." if limit else "."),
            (
                "raise data.max_response_length",
                "penalize long answers (reward.overlong_tokens)",
                "look at the samples: does the policy repeat itself, or never end?",
            ),
            "tutorials/flat-reward.md#2-does-the-reward-score-them-correctly",
            "rollouts?finish=length",
        )


def _mismatch(run: RunFolder) -> Iterator[Alarm]:
    name = "rollout/logprob_diff/mean"
    steps, values = _values(run, name)
    if len(values) < 2 * WINDOW:
        return
    first = fmean(values[:WINDOW])
    last = fmean(values[-WINDOW:])
    rise = max(THRESHOLDS["mismatch_small"].value, THRESHOLDS["mismatch_rise"].value * first)
    bound = run.logprob_diff_bound()
    near = bound is not None and last > THRESHOLDS["mismatch"].value * bound
    if near or last > rise:
        text = f"The log-probs of engines and trainer differ by {last:.2g} nats on average"
        text += f", compared with {first:.2g} at first"
        text += f"; the run stops at {bound:g}." if bound is not None else "."
        yield Alarm(
            "mismatch rises",
            name,
            steps[-1],
            text,
            (
                "compare model.dtype and the temperature of engines and trainer",
                "actor.router_replay for a mixture of experts",
                "lower trainer.max_staleness, or correct for it (actor.rollout_correction)",
            ),
            "troubleshooting.md#log-probabilities-differ",
            "rollouts?order=largest+log-prob+difference",
        )


def _ess(run: RunFolder) -> Iterator[Alarm]:
    name = "rollout/mismatch/ess"
    steps, values = _values(run, name)
    if len(values) >= WINDOW and (last := fmean(values[-WINDOW:])) < THRESHOLDS["ess"].value:
        yield Alarm(
            "ESS falls",
            name,
            steps[-1],
            f"The effective sample size is {last:.0%} of the tokens, because another policy "
            "sampled them.",
            (
                "lower trainer.max_staleness",
                "actor.rollout_correction reweights or excludes such tokens",
                "if the run is synchronous, engine and trainer differ: see the mismatch",
            ),
            "tutorials/flat-reward.md#5-are-samples-and-training-about-the-same-policy",
        )


RULES: tuple[Callable[[RunFolder], Iterator[Alarm]], ...] = (
    _entropy,
    _policy_kl,
    _reference_kl,
    _groups,
    _cut_off,
    _mismatch,
    _ess,
)


def table() -> str:
    """Return the table of thresholds in docs/watching.md."""
    rows = ["| Threshold | Value | Of what | Why |", "|---|---|---|---|"]
    for name, one in THRESHOLDS.items():
        rows.append(f"| `{name}` | {one.value:g} | {one.meaning} | {one.reason} |")
    return "\n".join(rows)


def _values(run: RunFolder, name: str) -> tuple[Sequence[int], Sequence[float]]:
    """Return the steps and values of a training metric, without gaps."""
    steps = []
    values = []
    for step, value in run.points("train", name):
        if value is not None:
            steps.append(int(step))
            values.append(value)
    return steps, values
