"""Mapping of a run's metrics to charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hybridflow.config.role_table import CRITICS
from hybridflow.observe.charts import Chart, Point, Series
from hybridflow.observe.head_charts import head_charts
from hybridflow.observe.run_folder import RunFolder

EXPECTED_METRICS: dict[str, tuple[str, ...]] = {
    "sft": ("sft/loss",),
    "train": (
        "critic/score/mean",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "response_length/mean",
        "response_length/max",
        "response_length/clip_ratio",
        "rollout/logprob_diff/mean",
        "rollout/logprob_diff/max",
        "timing_s/step",
    ),
}
# Fixed colours, independent of which phases were logged. Phases not listed here get the remaining
# colours, then the colour of "other".
_PHASES = (
    "gen",
    "update_actor",
    "old_log_prob",
    "update_weights",
    "ref",
    "save_checkpoint",
    "testing",
)
_PHASE_COLORS = {name: color for color, name in enumerate(_PHASES)}
_MAX_STACKED = 7
_MOST_CHARTS = 64  # maximum charts of a reward's or a flow's extra values


def chart_groups(run: RunFolder) -> list[tuple[str, list[Chart]]]:
    """Return the page's charts in reading order. Charts without data are dropped when drawn."""
    one = partial(_one, run)
    several = partial(_several, run)
    zero = (0.0,)
    kl = [("to the rollout policy", "actor/ppo_kl", 0), ("to the reference", "actor/ref_kl", 1)]
    return [
        (
            "Learning",
            [
                *(_accuracy(run, prefix) for prefix in run.val_sets() or ["val"]),
                one("Reward, mean of the batch", "critic/score/mean", "score", trend=True),
                *_reward_extras(run),
                one(
                    "Warm start (SFT) loss",
                    "sft/loss",
                    "nats per token",
                    phase="sft",
                    include=zero,
                    trend=True,
                ),
            ],
        ),
        (
            "Policy",
            [
                several(
                    "KL divergence",
                    kl,
                    "nats per token",
                    "actor/ppo_kl, actor/ref_kl",
                    include=zero,
                ),
                one("Entropy of the policy", "actor/entropy", "nats per token", include=zero),
                _gradient(run),
                one(
                    "Clipped tokens in the policy loss",
                    "actor/pg_clipfrac",
                    "tokens",
                    percent=True,
                    include=zero,
                ),
                several(
                    "Advantages",
                    _of("critic/advantages", "max", "mean", "min"),
                    "advantage",
                    "critic/advantages/*",
                ),
                one("Learning rate", "actor/lr", "", include=zero),
            ],
        ),
        *(
            (
                name.replace("_", " ").capitalize(),
                [
                    one(
                        "Variance of returns explained by values",
                        f"{name}/vf_explained_var",
                        "share",
                        include=(0.0, 1.0),
                    ),
                    one("Value loss", f"{name}/vf_loss", "half a squared error", include=zero),
                ],
            )
            for name in CRITICS.values()
        ),
        ("Reward model", _reward_model(run)),
        ("Flow", _recorded(run)),
        (
            "Generation",
            [
                several(
                    "Response length",
                    _of("response_length", "max", "mean"),
                    "tokens",
                    "response_length/*",
                    include=zero,
                ),
                one(
                    "Responses cut at the length limit",
                    "response_length/clip_ratio",
                    "responses",
                    percent=True,
                    include=zero,
                ),
                _difference(run),
                _mismatch(run),
                _routes(run),
            ],
        ),
        ("Prediction heads", head_charts(run)),
        (
            "Time",
            [
                _step_time(run),
                one("Throughput", "perf/throughput", "tokens per second per device", include=zero),
                one("Tokens trained on", "perf/total_num_tokens", "tokens per step", include=zero),
                one(
                    "Peak memory of a trainer rank",
                    "perf/max_memory_allocated_gb",
                    "GiB",
                    include=zero,
                ),
            ],
        ),
    ]


def _reward_model(run: RunFolder) -> list[Chart]:
    one = partial(_one, run)
    pairs = partial(_one, run, phase="reward")
    share = "reward_model/share"
    agreement = "reward_model/agreement"
    return [
        pairs("Loss on pairs", "reward/loss", "nats", include=(0.0,)),
        pairs("Pairs ranked correctly", "reward/accuracy", "share", include=(0.0, 1.0)),
        one("Score of the reward model", "reward_model/score/mean", "score"),
        one(
            "Share of score variance from the reward model",
            share,
            "share",
            percent=True,
            include=(0.0, 1.0),
        ),
        one(
            "Pairs of answers that reward model and verifier rank alike",
            agreement,
            "share of pairs",
            percent=True,
            include=(0.5, 1.0),
        ),
    ]


def step_phases(run: RunFolder) -> tuple[dict[str, list[Point]], dict[float, float]]:
    """Return the seconds per step spent in each phase, with `other` for the rest of the step, and
    the total seconds per step."""
    prefix = "timing_s/"
    found: dict[str, list[Point]] = {}
    for name in sorted(run.names("train")):
        phase = name.removeprefix(prefix)
        if name.startswith(prefix) and phase != "step" and "/" not in phase:
            found[phase] = run.points("train", name)
    logged = {}
    for step, value in run.points("train", prefix + "step"):
        if value is not None:
            logged[step] = value
    if not found and not logged:
        found, logged = _from_timeline(run)
    sums = dict(_sum(found.values()))
    total = {step: max(seconds, logged.get(step, 0.0)) for step, seconds in sums.items()}
    for step, seconds in logged.items():
        total.setdefault(step, seconds)
    rest: list[Point] = []
    whole = 0.0
    for step, seconds in sorted(total.items()):
        idle = max(0.0, seconds - sums.get(step, 0.0))
        rest.append((step, idle))
        whole += idle
    if whole > 0.001 * sum(total.values()):
        found["other"] = rest
    return found, total


def _from_timeline(run: RunFolder) -> tuple[dict[str, list[Point]], dict[float, float]]:
    """Compute the result of `step_phases` from timeline.jsonl, for runs without timing metrics."""
    sums: dict[str, dict[float, float]] = {}
    for record in run.timeline:
        if isinstance(record.get("step"), int) and "/" not in record["name"]:
            steps = sums.setdefault(record["name"], {})
            steps[record["step"]] = steps.get(record["step"], 0.0) + record["seconds"]
    total = sums.pop("step", {})
    return {name: sorted(steps.items()) for name, steps in sums.items()}, total


def _accuracy(run: RunFolder, prefix: str) -> Chart:
    name = f"{prefix}/score"
    points = run.points("val", name)
    percent = is_accuracy(run, prefix)
    notes = []
    for step, value in points:
        if value is not None:
            text = f"{value * 100:.1f} %" if percent else f"{value:.3g}"
            notes.append((step, value, text))
    if len(notes) > 1:
        step, value, text = notes[0]
        first = (step, value, f"before {text}")
        step, value, text = notes[-1]
        last = (step, value, f"after {text}")
        notes = [first, last]
    title = held_out_title(run, prefix)
    unit = "answers right" if percent else "mean score"
    series = [Series(name, points, 0)]
    return Chart(title, series, unit, name, percent=percent, include=(0.0,), notes=notes)


def held_out_title(run: RunFolder, prefix: str) -> str:
    """Return the chart title for the scores on a validation set whose metrics start with
    `prefix`."""
    title = "Held-out accuracy" if is_accuracy(run, prefix) else "Held-out score"
    name = prefix.removeprefix("val").removeprefix("-")
    return f"{title} of {name}" if name else title


def is_accuracy(run: RunFolder, prefix: str) -> bool:
    """Return True if every score of the set is 0 or 1, in which case their mean is an accuracy."""
    accuracies = run.points("val", f"{prefix}/accuracy")
    scores = run.points("val", f"{prefix}/score")
    return len(accuracies) == len(scores)


def _reward_extras(run: RunFolder) -> list[Chart]:
    """Return a chart for each extra number returned by the reward."""
    prefix = "reward_extra/"
    end = "/mean"
    charts: list[Chart] = []
    for name in sorted(run.names("train")):
        if name.startswith(prefix) and name.endswith(end):
            part = name.removeprefix(prefix).removesuffix(end)
            charts.append(_one(run, f"Reward: {part}, mean of the batch", name, "mean"))
    return charts[:_MOST_CHARTS]


def _recorded(run: RunFolder) -> list[Chart]:
    """Return a chart for each number that the flow has recorded, for the sampled score if the flow
    has replaced it, and for the score and KL divergence of each additional policy."""
    charts = [_one(run, "Score as it was sampled", "critic/sampled_score/mean", "score")]
    end = "/critic/score/mean"
    names = sorted(run.names("train"))
    for score in names:
        if score.endswith(end):
            policy = score.removesuffix(end)
            change = f"{policy}/actor/ppo_kl"
            charts.append(_one(run, f"Score of the {policy}", score, "score"))
            charts.append(_one(run, f"Policy change of the {policy}", change, "KL"))
    for name in names:
        if name.startswith("flow/"):
            charts.append(_one(run, name.removeprefix("flow/"), name, ""))
    return charts[:_MOST_CHARTS]


def _gradient(run: RunFolder) -> Chart:
    limit = run.setting("actor.optim.clip_grad")
    values = run.values("train", "actor/grad_norm")
    # Show the limit only if it is close, because a limit far above would flatten the curve.
    near = isinstance(limit, int | float) and limit > 0 and values and limit <= 2 * max(values)
    lines = [(float(limit), "clipped above")] if near else []
    return _one(run, "Gradient norm", "actor/grad_norm", "L2 norm", include=(0.0,), lines=lines)


def _difference(run: RunFolder) -> Chart:
    names = [("largest", "rollout/logprob_diff/max", 1), ("mean", "rollout/logprob_diff/mean", 0)]
    bound = run.logprob_diff_bound()
    lines = [(bound, f"bound on the mean {bound:g}")] if bound is not None else []
    about = "rollout/logprob_diff/*: |engine - trainer| on the same tokens"
    return _several(run, "Log-probability difference", names, "nats", about, log=True, lines=lines)


def _mismatch(run: RunFolder) -> Chart:
    names = [
        ("all tokens, with importance weights", "rollout/mismatch/ess", 0),
        ("with the weights used in updates", "rollout_correction/ess", 1),
    ]
    about = (
        "rollout/mismatch/ess, rollout_correction/ess: mean(w)^2 / mean(w^2), w = trainer / engine"
    )
    return _several(
        run, "Effective sample size", names, "share of tokens", about, percent=True, include=(0.0,)
    )


def _routes(run: RunFolder) -> Chart:
    names = [
        ("trainer differs from the engine", "actor/router_replay/differing", 0),
        ("updated router differs from the record", "actor/router_replay/drifted", 1),
    ]
    note = " (not replayed)" if run.setting("actor.router_replay") == "compare" else " (replayed)"
    about = "actor/router_replay/differing, drifted"
    title = f"Router choices that differ{note}"
    return _several(run, title, names, "tokens x layers", about, percent=True, include=(0.0,))


def sums_of(phases: Mapping[str, Sequence[Point]]) -> dict[str, float]:
    """Return the sum of the values of each phase over all steps. Missing values count as 0."""
    sums = {}
    for name, points in phases.items():
        sums[name] = sum(value or 0.0 for _, value in points)
    return sums


def _step_time(run: RunFolder) -> Chart:
    phases, _ = step_phases(run)
    sums = sums_of(phases)
    named = [name for name in sorted(sums, key=lambda name: -sums[name]) if name != "other"]
    kept = sorted(named, key=lambda name: _PHASE_COLORS.get(name, len(_PHASE_COLORS)))
    smallest = set(named[_MAX_STACKED:])
    free = sorted(set(range(8)) - set(map(_PHASE_COLORS.get, kept)))
    series = []
    rest = [phases["other"]] if "other" in phases else []
    for name in kept:
        color = _PHASE_COLORS.get(name)
        if color is None and free:
            color = free.pop(0)
        if name in smallest or color is None:
            rest.append(phases[name])
        else:
            series.append(Series(name, phases[name], color))
    if rest:
        series.append(Series("other", _sum(rest), None))
    about = "timing_s/*"
    whole = sum(value or 0.0 for _, value in run.points("train", "timing_s/step"))
    if 0 < 1.02 * whole < sum(sums.values()):
        about += "; phases on different devices overlap and add up to more than a step"
    return Chart("Step time by phase", series, "seconds", about, kind="stack")


def _sum(columns: Iterable[Sequence[Point]]) -> list[tuple[float, float]]:
    sums: dict[float, float] = {}
    for points in columns:
        for step, value in points:
            sums[step] = sums.get(step, 0.0) + (value or 0.0)
    return sorted(sums.items())


def _one(
    run: RunFolder, title: str, name: str, unit: str, phase: str = "train", **settings: Any
) -> Chart:
    """Return a chart of one metric. A chart without points is dropped when drawn."""
    color = 1 if phase == "sft" else 0
    series = [Series(name, run.points(phase, name), color)]
    return Chart(title, series, unit, name, phase=phase, **settings)


def _several(
    run: RunFolder,
    title: str,
    names: Sequence[tuple[str, str, int]],
    unit: str,
    about: str,
    **settings: Any,
) -> Chart:
    """Return a chart of several training metrics; `names` contains a label, metric name and colour
    for each."""
    series = []
    for label, name, color in names:
        series.append(Series(label, run.points("train", name), color))
    return Chart(title, series, unit, about, **settings)


def _of(group: str, *parts: str) -> list[tuple[str, str, int]]:
    """Return (label, metric name, colour) for each of a metric's statistics."""
    colors = {"mean": 0, "max": 1, "min": 2}
    return [(part, f"{group}/{part}", colors[part]) for part in parts]
