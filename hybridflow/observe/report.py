"""`report.html`: a self-contained page about a run, built from its folder. It loads no external
resources, and all text from the run is escaped.

`status`, `score_before`, `score_after`, `steps` and `wall_time_s` are read from summary.json if
present, or else computed from the metrics. The rest of the summary is shown unchanged.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hybridflow.errors import naming
from hybridflow.observe.charts import Drawn, draw
from hybridflow.observe.plan_picture import pictures
from hybridflow.observe.progress import duration
from hybridflow.observe.report_charts import (
    EXPECTED_METRICS,
    chart_groups,
    held_out_title,
    is_accuracy,
    step_phases,
    sums_of,
)
from hybridflow.observe.run_folder import RunFolder, load_run
from hybridflow.observe.run_samples import Sample
from hybridflow.observe.step_picture import step_pictures
from hybridflow.observe.templates import TEXT_LIMIT, cut, fill, plain

REPORT_NAME = "report.html"
# nesting depth of the summary and environment tables
_DEPTH = 8
_ROWS = 2_000
_MOST_SECONDS = 1e10
_LISTS = (  # parts of the page that may be empty
    "facts",
    "missing",
    "warnings",
    "changes",
    "time_rows",
    "outside_rows",
    "samples",
    "summary",
    "environment",
)

Fact = tuple[str, str, str]  # label, value, note
Group = tuple[str, list[Drawn]]  # heading, charts


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path. The page lists files that are
    missing from the folder."""
    run = load_run(Path(run_dir))
    path = Path(run_dir) / REPORT_NAME
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    page = render(run)
    try:
        with naming(path):
            temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def render(run: RunFolder) -> str:
    """Return the page as HTML text."""
    samples = []
    has_tokens = False
    for sample in run.samples:
        title = _sample_title(sample)
        has_prompt = any(row.get("prompt_text") for row in sample.rows)
        has_tokens |= any(row["tokens"] for row in sample.rows)
        samples.append((sample, title, has_prompt))
    return _page(
        **overview(run),
        groups=[*drawn_groups(run), *process_groups(run)],
        samples=samples,
        has_tokens=has_tokens,
        config_text=run.config_text,
        environment=list(islice(_flat(run.environment), _ROWS)),
    )


def overview(run: RunFolder) -> dict[str, Any]:
    """Return the parts of the page that come from the metrics and the summary, without charts."""
    warnings = []
    for record in run.metrics:
        if "warning" in record:
            warnings.append(f"{_place(record)}: {record['warning']}")
    changes = []
    for record in run.changes:
        lines = list(map(str, record["changes"]))
        changes.append((_place(record), lines))
    summary = (row for row in _flat(run.summary) if not row[0].startswith("planned.plan."))
    return {
        "name": run.name,
        "status": _status(run),
        "facts": facts(run),
        "missing": missing(run),
        "warnings": warnings,
        "changes": changes,
        "time_rows": _time_rows(run),
        "outside_rows": _outside_rows(run),
        "summary": list(islice(summary, _ROWS)),
    }


def _place(record: Mapping[str, Any]) -> str:
    return f"{record.get('phase')} step {record.get('step')}"


def write_plan(path: Path, name: str, verdict: str, plan: Mapping[str, Any], text: str) -> None:
    """Write an HTML page about a plan. No run is required.

    Args:
        plan: `phases` and `device_bytes` from `Plan.figures()`.
        text: the plan formatted as a text table.
    """
    groups = [("Plan", pictures(plan["phases"], plan["device_bytes"], {}))]
    page = _page(
        name=name, status=verdict, groups=groups, config_title="Plan as text", config_text=text
    )
    with naming(path):
        path.write_text(page, encoding="utf-8")


def _page(**parts: Any) -> str:
    empty = dict.fromkeys(_LISTS, ())
    nonce = secrets.token_urlsafe(16)
    defaults = {"config_title": "", "has_tokens": False, "nonce": nonce}
    return fill("report", **(empty | defaults | parts))


def facts(run: RunFolder) -> list[Fact]:
    """Return the tiles shown at the top of the page."""
    found = []
    for number, prefix in enumerate(run.val_sets() or ["val"]):
        found.append(_accuracy(run, number, prefix))
    tiles = (_reward, _steps, _time, _throughput, _layout, _model, _flow, _routes)
    found += [tile(run) for tile in tiles]
    return list(filter(None, found))


def missing(run: RunFolder) -> list[str]:
    """Return sentences that list missing files, phases and metrics."""
    found = list(run.missing)
    for phase, names in EXPECTED_METRICS.items():
        if phase == "sft" and run.setting("sft.steps") in (0, None):
            continue
        if phase != "sft" and run.names("reward"):
            # a run that trains a reward model has no RL steps and no validation
            continue
        logged = run.names(phase)
        absent = [name for name in names if name not in logged]
        if run.metrics and absent == list(names):
            found.append(f"no {phase} step was recorded")
        elif run.metrics and absent:
            found.append(f"metrics never logged in {phase} steps: " + ", ".join(absent))
    if run.metrics and not run.val_sets() and not run.names("reward"):
        found.append("no val step was recorded")
    return found


def drawn_groups(run: RunFolder) -> list[Group]:
    """Return the charts of the metrics, grouped under headings."""
    marks = []
    for record in run.changes:
        if record.get("phase") == "rl":
            marks.append((record["step"], "changed"))
    groups: list[Group] = []
    for title, charts in chart_groups(run):
        drawn = []
        for chart in charts:
            shown = marks if chart.phase == "train" else ()
            drawn.append(draw(replace(chart, marks=shown)))
        usable = list(filter(None, drawn))
        if usable:
            groups.append((title, usable))
    return groups


def process_groups(run: RunFolder) -> list[Group]:
    """Return the pictures of one step on all processes, and of the plan. May read many files."""
    groups = [
        ("Processes", step_pictures(run.path)),
        ("Plan", _plan_pictures(run.summary.get("planned"))),
    ]
    return [group for group in groups if group[1]]


def _plan_pictures(planned: Any) -> list[Drawn]:
    """Return the pictures for the entry `planned` in summary.json; empty if the run had no plan or
    the value is malformed."""
    try:
        measured = {}
        for name, pair in planned["seconds"].items():
            if pair["measured"] is not None:
                measured[name] = pair["measured"]
        plan = planned["plan"]
        return pictures(plan["phases"], plan["device_bytes"], measured)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError):
        return []


def _status(run: RunFolder) -> str:
    status = run.summary.get("status")
    if isinstance(status, str) and status:
        return status[:TEXT_LIMIT]
    return "finished" if run.summary else "not finished"


def _accuracy(run: RunFolder, number: int, prefix: str) -> Fact | None:
    """Return the score on a validation set. For the first set, values in the summary take
    precedence."""
    scores = run.values("val", f"{prefix}/score")
    summary = {} if number else run.summary
    before = summary.get("score_before", scores[0] if scores else None)
    after = summary.get("score_after", scores[-1] if len(scores) > 1 else None)
    title = held_out_title(run, prefix)
    text = _percent if is_accuracy(run, prefix) else plain
    if before is None and after is None:
        return None
    if before is None or after is None:
        return title, text(before if after is None else after), "measured once"
    return title, f"{text(before)} → {text(after)}", "before → after"


def _reward(run: RunFolder) -> Fact | None:
    values = run.values("train", "critic/score/mean")
    if not values:
        return None
    size = max(1, min(10, len(values) // 4))
    first = _mean(values[:size])
    last = _mean(values[-size:])
    which = f"first → last {size} steps" if size > 1 else "first → last step"
    return "Mean reward", f"{first:.3f} → {last:.3f}", which


def _steps(run: RunFolder) -> Fact:
    done = run.summary.get("steps")
    if not isinstance(done, int | str):
        done = run.last_step("train")
    total = run.setting("trainer.total_steps")
    text = f"{done} of {total}" if total else str(done)
    sft = len(run.points("sft", "sft/loss"))
    return "Training steps", cut(text), f"after {sft} SFT steps" if sft else ""


def _time(run: RunFolder) -> Fact | None:
    seconds = run.summary.get("wall_time_s")
    found = [record.get("wall_time") for record in run.metrics]
    for record in run.timeline:
        found += [record.get("start"), record.get("end")]
    times = [time for time in found if isinstance(time, int | float)]
    if seconds is None and times:
        seconds = max(times) - min(times)
    if not isinstance(seconds, int | float) or not 0 <= seconds < _MOST_SECONDS:
        return None
    each = run.values("train", "timing_s/step")
    per_step = f"{_mean(each):.1f} s per step" if each else ""
    return "Wall time", duration(seconds), per_step


def _throughput(run: RunFolder) -> Fact | None:
    values = run.values("train", "perf/throughput")
    if not values:
        return None
    return "Throughput", f"{_mean(values):,.0f} tokens/s per device", "mean over steps"


def _routes(run: RunFolder) -> Fact | None:
    kind = run.setting("actor.router_replay")
    name = "actor/router_replay/drifted" if kind == "r2" else "actor/router_replay/differing"
    shares = run.values("train", name)
    if not shares:
        return None
    whose = "the record" if kind == "r2" else "the engines"
    what = "not replayed: the trainer used its own" if kind == "compare" else f"replayed ({kind})"
    percent = _mean(shares) * 100
    return f"Router choices that differ from {whose}", f"{percent:.2f} %", what


def _layout(run: RunFolder) -> Fact | None:
    actor = run.config.get("actor")
    if not isinstance(actor, Mapping) or "parallel" not in actor:
        return None
    tensor = run.size("actor.parallel.tensor")
    pipeline = run.size("actor.parallel.pipeline")
    context = run.size("actor.parallel.context")
    expert = run.size("actor.parallel.expert")
    world = run.size("cluster.nodes") * run.size("cluster.procs_per_node")
    data = world // (tensor * pipeline * context) or 1
    parts = []
    for short, size in (("TP", tensor), ("PP", pipeline), ("CP", context), ("EP", expert)):
        if size > 1:
            parts.append(f"{short}{size}")
    parts.append(f"DP{data}")
    number = run.size("rollout.num_engines")
    engines = f"{number} engine{'s' if number != 1 else ''} of TP{run.size('rollout.tensor')}"
    return "Layout", " ".join(parts), f"{world} trainer ranks; {engines}"


def _model(run: RunFolder) -> Fact | None:
    dtype = str(run.setting("model.dtype") or "")
    path = run.setting("model.path")
    if path:
        return "Model", Path(str(path)).name, dtype
    kind = run.setting("model.hf_config.model_type")
    if not kind:
        return None
    words = {"num_hidden_layers": "layers", "hidden_size": "wide", "num_experts": "experts"}
    parts = []
    for key, word in words.items():
        size = run.setting(f"model.hf_config.{key}")
        if size:
            parts.append(f"{size} {word}")
    parts.append(dtype)
    return "Model", str(kind), ", ".join(parts).strip(", ")


def _flow(run: RunFolder) -> Fact | None:
    """Return the tile for a flow that is defined in a user file."""
    flow = str(run.setting("algorithm.flow") or "")
    path, _, name = flow.rpartition(":")
    return ("Flow", cut(name), cut(path)) if path.endswith(".py") else None


def _time_rows(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return rows of (phase, mean seconds over all steps, share of the step)."""
    phases, total = step_phases(run)
    whole = sum(total.values())
    if not whole:
        return []
    sums = sums_of(phases)
    rows = []
    for name in sorted(sums, key=lambda name: -sums[name]):
        mean = sums[name] / len(total)
        share = sums[name] / whole
        rows.append((name, f"{mean:.2f}", f"{share * 100:.0f} %"))
    return rows


def _outside_rows(run: RunFolder) -> list[tuple[str, str]]:
    """Return rows of (phase, duration) for phases outside of steps, for example starting the
    engines."""
    rows: list[tuple[str, str]] = []
    for record in run.timeline:
        if record.get("step") is None:
            rows.append((str(record["name"]), duration(record["seconds"])))
    return rows


def _sample_title(sample: Sample) -> str:
    kind, _, name = sample.kind.partition("-")
    title = f"Validation answers of {name}" if name else "Validation answers"
    if kind == "rollouts":
        title = "Rollouts"
    shown = min(len(sample.rows), sample.count)
    rows = f"{shown} of {sample.count} rows"
    if sample.mean_score is not None:
        rows += f", mean score {sample.mean_score:.3f}"
    return f"{title} of step {sample.step} ({rows})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: Any) -> str:
    return f"{value * 100:.1f} %" if isinstance(value, float) else plain(value)


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield cut(f"{prefix}{key}"), plain(value)
