"""The model card (README.md) of an export, generated from the run's records. Facts that were not
recorded are omitted, and the user chooses the licence. The run folder may come from another user,
so sizes are limited and texts are escaped.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from hybridflow.config.build import to_plain
from hybridflow.config.model_config import flattened
from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.outside_yaml import read_outside_yaml
from hybridflow.config.schema import RunConfig
from hybridflow.errors import HybridFlowError, naming
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.printable import printable
from hybridflow.observe.text_table import filled
from hybridflow.saving.store import CheckpointStore, Retention

Metrics = Mapping[str, Any]  # one record of the run's metrics
Fact = tuple[str, Any]  # a row of a table: label and value; not shown if the value is missing
CARD = "README.md"
EVALUATIONS = "eval"  # the run's folder of evaluations
RESULTS = "results.json"  # of one evaluation
_MOST_METRICS_BYTES = 128 << 20
_MOST_RESULTS_BYTES = 8 << 20
_MOST_TEXT = 200
_MOST_EVALUATIONS = 16
_ROWS = 12  # of the curve
_CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/(\w+)")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
# paths and machine settings, which do not describe the model
_NOT_SHOWN = (
    "name",
    "output_dir",
    "cluster",
    "trainer.loggers",
    "rollout.python",
    "rollout.agent.mcp_servers",
    "model.path",
)
_CURVE = {
    "critic/score/mean": "score",
    "response_length/mean": "response tokens",
    "actor/ref_kl": "KL to reference",
    "actor/entropy": "entropy",
}
_CODE = "    "  # Markdown shows indented lines as they are
_PACKAGES = ("torch", "megatron-core", "transformers")


def write_card(export: Path, run: Path, step: int | None = None) -> Path:
    """Write the model card of an export, replacing an earlier one. Returns its path.

    Args:
        run: the folder of the run that trained the model.
        step: the step at which the weights were saved; None for the run's last step, -1 for weights
            from before the training loop.

    Raises:
        StorageError: the file cannot be written.
    """
    path = export / CARD
    temporary = path.with_name(f".{CARD}.tmp")
    with naming(path):
        temporary.write_text(card(export, run, step), encoding="utf-8")
        os.replace(temporary, path)
    return path


def card(export: Path, run: Path, step: int | None = None) -> str:
    """Return the text of the model card (see `write_card`)."""
    config = _config(run)
    environment = _json(run / "environment.json", _MOST_RESULTS_BYTES)
    metrics = _metrics(run, math.inf if step is None else step)
    model = flattened(_json(export / "config.json", _MOST_RESULTS_BYTES))
    reached = step
    if step is None:
        reached = max((one["step"] for one in metrics), default=None)
    sections = [
        _front_matter(config, model),
        f"# {_text(config.get('name') or export.name)}",
        _opening(environment, reached),
        _section("Model", _table(_model_facts(config, model))),
        _section("Data", _table(_data_facts(config, run))),
        _section("Recipe", _recipe(config)),
        _section("Training curve", _curve(metrics)),
        _section("Evaluation", _evaluation(metrics, run, reached)),
        _section("Versions", _table(_version_facts(environment))),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


# ---- sections


def _front_matter(config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    lines = ["library_name: transformers"]
    if _architecture(model).endswith("ForCausalLM"):
        lines.append("pipeline_tag: text-generation")
    if base := _hub_id(_value(config, "model.path")):
        lines.append(f"base_model: {base}")
    lines += ["tags: [hybridflow, reinforcement-learning]", "# license: to be filled in"]
    return "\n".join(["---", *lines, "---"])


def _opening(environment: Mapping[str, Any], step: int | None) -> str:
    version = environment.get("hybridflow")
    opening = "Trained with HybridFlow"
    if isinstance(version, str):
        opening += f" {_text(version)}"
    if step is not None and step >= 0:
        opening += f"; weights after step {step}"
    return f"{opening}."


def _model_facts(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Fact]:
    path = _value(config, "model.path")
    if config:
        base = _hub_id(path)
        if not base and isinstance(path, str):
            base = Path(path).name
        yield "base model", base or "none: trained from random weights"
    yield "architecture", _architecture(model)
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        yield name, model.get(name)
    yield "precision", model.get("dtype") or model.get("torch_dtype")
    rank = _value(config, "actor.lora.rank")
    if isinstance(rank, int) and rank:
        yield "adapters", f"low-rank adapters of rank {rank}, merged"


def _data_facts(config: Mapping[str, Any], run: Path) -> Iterator[Fact]:
    digests = _digests(run)
    for key, label in (
        ("sft.train_files", "demonstrations"),
        ("data.train_files", "training prompts"),
        ("data.val_files", "held-out prompts"),
        ("reward_training.train_files", "preference pairs"),
    ):
        group, _, _ = key.partition(".")
        if group != "data" and not _value(config, f"{group}.steps"):
            continue
        known = digests.get(key, {})
        files = _value(config, key)
        names = []
        for file in map(str, files if isinstance(files, list) else ()):
            name = _short(file)
            if file in known:
                name += f" (xxh3 {known[file]})"
            names.append(name)
        yield label, ", ".join(names)
    sets = _value(config, "data.val_sets")
    if isinstance(sets, dict):
        yield "further held-out sets", ", ".join(map(str, sets))
    task = _value(config, "data.prepare.task")
    if task is not None:
        options = _value(config, "data.prepare.options") or {}
        yield "prepared by", f"`hybridflow prepare {task}`, options {json.dumps(options)}"


def _recipe(config: Mapping[str, Any]) -> str:
    """Return the settings that differ from the defaults."""
    import yaml

    changed = _changed(config, to_plain(RunConfig()))
    if not changed:
        return ""
    text = yaml.safe_dump(changed, sort_keys=False, default_flow_style=None, width=100)
    return f"Settings that differ from the defaults:\n\n{indent(text.rstrip(), _CODE)}"


def _changed(given: Mapping[str, Any], default: Mapping[str, Any], prefix: str = "") -> Any:
    found = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        usual = default.get(name)
        if key in _NOT_SHOWN or value == usual or name not in default:
            continue
        if isinstance(value, Mapping) and isinstance(usual, Mapping) and usual:
            if inner := _changed(value, usual, f"{key}."):
                found[name] = inner
        else:
            found[name] = _without_folders(value)
    return found


def _curve(metrics: Sequence[Metrics]) -> str:
    trained = _by_step(metrics, "train")
    validated = _by_step(metrics, "val")
    if not trained:
        return ""
    has_accuracy = any("val/accuracy" in one for one in validated.values())
    kind = "accuracy" if has_accuracy else "score"
    columns = {f"val/{kind}": f"held-out {kind}", **_CURVE}
    rows = [["step", *columns.values()]]
    steps = sorted({*trained, *validated})
    for step in _shown_steps(steps, list(validated)):
        values = {**validated.get(step, {}), **trained.get(step, {})}
        row = [str(step)]
        row += [_number(values.get(name)) for name in columns]
        rows.append(row)
    return _lines(filled(rows))


def _by_step(metrics: Sequence[Metrics], phase: str) -> dict[int, Metrics]:
    """Return the records of a phase, keyed by step."""
    return {one["step"]: one for one in metrics if one.get("phase") == phase}


def _shown_steps(steps: Sequence[int], validated: Sequence[int]) -> list[int]:
    """Select steps to show: evenly spaced ones and, if there is room, every validation."""
    if len(steps) <= _ROWS:
        return list(steps)
    shown = set(validated) if len(validated) <= _ROWS else set()
    last = len(steps) - 1
    for row in range(_ROWS):
        shown.add(steps[round(row * last / (_ROWS - 1))])
    return sorted(shown)


def _evaluation(metrics: Sequence[Metrics], run: Path, step: int | None) -> str:
    """Return the section with the last validation and the evaluations of these weights."""
    rows = [["set", "statistic", "value", "95% interval"]]
    validated = _by_step(metrics, "val")
    if step is not None and step == max(validated, default=None):
        for name, value in validated[step].items():
            if re.fullmatch(r"val(-[^/]+)?/(score|accuracy|(mean|pass|maj)@\d+)", name):
                prefix, _, statistic = name.partition("/")
                rows.append([f"{prefix} (in training)", statistic, _number(value), ""])
    for result in _results(run, step):
        for name, one in result.items():
            rows += _result_rows(name, one)
    return _lines(rows) if len(rows) > 1 else ""


def _results(run: Path, step: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield the per-set results of each evaluation of these weights."""
    if step is None:
        return
    found = sorted((run / EVALUATIONS).glob(f"*/{RESULTS}"))
    for file in found[:_MOST_EVALUATIONS]:
        values = _json(file, _MOST_RESULTS_BYTES)
        sets = values.get("sets")
        if values.get("step") == step and isinstance(sets, dict):
            yield sets


def _result_rows(name: str, one: Any) -> Iterator[list[str]]:
    statistics = _value(one, "statistics")
    if not isinstance(statistics, dict):
        return
    for statistic, found in statistics.items():
        if not isinstance(found, dict):
            continue
        ends = found.get("interval")
        interval = ""
        if isinstance(ends, list) and len(ends) == 2:
            low, high = map(_number, ends)
            interval = f"{low} to {high}"
        yield [_text(name), _text(statistic), _number(found.get("value")), interval]


def _version_facts(environment: Mapping[str, Any]) -> Iterator[Fact]:
    yield "hybridflow", environment.get("hybridflow")
    commit = _value(environment, "git.commit")
    if isinstance(commit, str):
        modified = " (modified)" if _value(environment, "git.modified") else ""
        yield "commit", f"{commit}{modified}"
    for name in _PACKAGES:
        yield name, _value(environment, f"packages.{name}")
    devices = environment.get("accelerators")
    if isinstance(devices, list) and devices:
        yield "accelerators", ", ".join(map(str, devices[:8]))


# ---- reading


def _config(run: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_outside_yaml(run / "config.yaml")[1]
    return {}


def _json(path: Path, most_bytes: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_outside_json(path, most_bytes)
    return {}


def _metrics(run: Path, most: float) -> list[dict[str, Any]]:
    """Return the metric records up to a step. If a step was recorded twice in the same phase, only
    the last record is kept.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with suppress(HybridFlowError, OSError):
        for record in read_jsonl(run / "metrics.jsonl", most_bytes=_MOST_METRICS_BYTES):
            step = record.get("step")
            phase = record.get("phase")
            if type(step) is int and 0 <= step <= most and phase in ("train", "val"):
                found[phase, step] = record
    return list(found.values())


def _digests(run: Path) -> dict[str, dict[str, str]]:
    """Return {setting: {file: digest of its content}}, as recorded in the latest checkpoint."""
    with suppress(HybridFlowError, OSError):
        latest = CheckpointStore(run / "checkpoints", Retention()).latest()
        files = latest.fingerprint.files if latest is not None else {}
        found = {}
        for key, pairs in files.items():
            found[key] = {pair[0]: pair[1] for pair in pairs}
        return found
    return {}


def _value(node: Any, dotted: str) -> Any:
    """Return the value at a dotted path; None if a part of the path is missing."""
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _architecture(model: Mapping[str, Any]) -> str:
    names = model.get("architectures")
    return _text(names[0]) if isinstance(names, list) and names else ""


def _hub_id(path: Any) -> str:
    """Return the hub id of a model's folder in the Hugging Face cache; an empty string for any
    other folder."""
    if not isinstance(path, str):
        return ""
    if found := _CACHED.search(path):
        return f"{found[1]}/{found[2]}"
    is_id = _HUB.fullmatch(path) is not None and not Path(path).exists()
    return path.partition("@")[0] if is_id else ""


# ---- text


def _section(title: str, body: str) -> str:
    return f"## {title}\n{body}" if body else ""


def _table(facts: Iterable[Fact]) -> str:
    rows = []
    for name, value in facts:
        if value not in (None, ""):
            rows.append([name, _text(value)])
    return _lines([["", ""], *rows]) if rows else ""


def _lines(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table. The first row contains the column titles."""
    lines = []
    for row in rows:
        cells = " | ".join(row)
        lines.append(f"| {cells} |")
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def _number(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.4g}" if is_number and math.isfinite(value) else ""


def _text(value: Any) -> str:
    """Format a value as one line of plain text, with Markdown tables and HTML escaped."""
    line = " ".join(printable(str(value)[: 4 * _MOST_TEXT]).split())
    for mark in "|<>":
        line = line.replace(mark, f"\\{mark}")
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."


def _short(path: str) -> str:
    """Shorten a path so that it does not reveal this machine's folders."""
    return Path(path).name if Path(path).is_absolute() else path


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_without_folders, value))
    if isinstance(value, str):
        return "(address)" if "://" in value else _short(value)
    return value
