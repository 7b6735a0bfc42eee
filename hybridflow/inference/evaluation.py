"""Evaluation of a model: the validation of a run, but as a separate command and with confidence
intervals. Results are written as JSON and shown as a table.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.load import dump_yaml
from hybridflow.config.schema import RunConfig
from hybridflow.config.val_sets import tag, val_sets
from hybridflow.errors import CheckpointError, ConfigError, naming
from hybridflow.inference.engines import started
from hybridflow.inference.intervals import LEVEL, METHODS, interval_of
from hybridflow.inference.model import Model, opened
from hybridflow.inference.source import Source
from hybridflow.observe.environment import package_versions
from hybridflow.observe.jsonl import finite
from hybridflow.observe.logfile import setup_logging, stop_logging
from hybridflow.observe.progress import Progress
from hybridflow.observe.text_table import aligned
from hybridflow.process.surroundings import without_proxy
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.answer_statistics import numbers_up_to, statistics_by_prompt
from hybridflow.rollout.conversations import conversing
from hybridflow.rollout.evaluation import (
    Scorer,
    Validator,
    check_truths,
    open_val_sets,
    sources_to_score,
)
from hybridflow.saving.fingerprint import Fingerprint
from hybridflow.saving.model_card import RESULTS
from hybridflow.saving.store import read_checkpoint
from hybridflow.single_controller import block_on
from hybridflow.trainer import assets
from hybridflow.trainer.preload import Preload

Row = tuple[str, str, str, str, str, str]
_SHOW_S = 10.0  # between two lines of progress


@dataclass(frozen=True)
class Wanted:
    """The options of an evaluation.

    Attributes:
        out: an existing folder for results and logs.
        ks: values of k for pass@k and maj@k, in addition to those used in validation.
        dumps: True to also write every answer as parquet.
        since: `time.monotonic()` at the start of the command.
    """

    out: Path
    ks: Sequence[int] = ()
    dumps: bool = False
    since: float = 0.0


def evaluate(
    source: Source, config: RunConfig, wanted: Wanted, preload: Preload, progress: Progress
) -> dict[str, Any]:
    """Evaluate a model, write the results to `RESULTS`, and return them. `metrics` contains the
    same metrics as a run's validation, computed by the same code.

    Raises:
        ConfigError: k exceeds the number of answers.
        DataError: a data source has no verifier, or a row is malformed.
        EngineError: engines did not start, or were lost too often.
    """
    check_ks(config, wanted.ks)
    # rewards and tools also connect to addresses of this machine
    os.environ.update(without_proxy(os.environ))
    setup_logging(wanted.out)
    try:
        with ExitStack() as stack:
            results = _evaluate(source, config, wanted, preload, progress, stack)
    finally:
        stop_logging()
    results["seconds"]["total"] = time.monotonic() - wanted.since
    text = json.dumps(finite(results), indent=2, allow_nan=False)
    _write(wanted.out / RESULTS, f"{text}\n")
    return results


def check_ks(config: RunConfig, ks: Sequence[int]) -> None:
    """Raise ConfigError if a value of k is larger than a set's number of answers per prompt."""
    most = max(ks, default=0)
    for name, one in val_sets(config).items():
        if one.files and most > one.samples:
            prefix = f"data.val_sets.{name}." if name else "rollout.val_"
            key = f"{prefix}samples"
            raise ConfigError(
                f"--k {most} requires that many answers per prompt, but {key}={one.samples}; set "
                f"{key}={most} (and {prefix}sampling.temperature above 0), or a smaller k"
            )


def _evaluate(
    source: Source,
    config: RunConfig,
    wanted: Wanted,
    preload: Preload,
    progress: Progress,
    stack: ExitStack,
) -> dict[str, Any]:
    if message := assets.prepare_data(config):
        progress.message(message)
    logs = wanted.out / "logs"
    model = stack.enter_context(opened(source, config, progress))
    _write(wanted.out / "config.yaml", dump_yaml(model.config))
    for line in _changes(source, model):
        progress.message(line)
    engines = stack.enter_context(started(model, source.step or 0, logs, preload, progress))
    validator = _validator(model, wanted.out, stack)
    with progress.stage(f"start {config.rollout.engine}"):
        engines.wait()
    answering = conversing(engines.requests, model.tokenizer, model.config, logs)
    stack.callback(lambda: block_on(answering.close()))
    shown = _Shown(wanted.since, progress)
    metrics: dict[str, float] = {}
    sets: dict[str, Any] = {}

    async def answer() -> None:
        async for name, batch in validator.scored(answering, shown.watch):
            if wanted.dumps:
                validator.dump(name, batch, source.step or 0)
            own = validator.metrics(name, batch)
            metrics.update(own)
            sets[f"val{tag(name)}"] = _set_results(config, name, batch, own, wanted.ks)

    block_on(answer())
    return {
        "model": str(source.folder),
        "step": source.step,
        "metrics": metrics,
        "sets": sets,
        "intervals": {"level": LEVEL, **METHODS},
        "seconds": {"first_answer": shown.first_s},
        "versions": package_versions(),
    }


def _changes(source: Source, model: Model) -> list[str]:
    """Return one line for each of the evaluation's files, and for each part of the tokenizer, that
    has changed since the checkpoint was saved.
    """
    if source.manifest is None:
        return []
    try:
        before = read_checkpoint(source.folder.parent).fingerprint
    except CheckpointError:
        return []
    now = Fingerprint.of(model.config, model.tokenizer.digests(), {})
    same = {}  # keys that still name the same files, wherever they are
    for key, files in before.files.items():
        if _names(files) == _names(now.files.get(key, ())):
            same[key] = files
    before = replace(before, settings={"": ""}, packages={}, files=same)
    return replace(now, settings={"": ""}).changes(before)


def _names(files: Sequence[Sequence[str]]) -> list[str]:
    """Return the names, without folders, of a fingerprint's files."""
    return [Path(file[0]).name for file in files]


def _validator(model: Model, out: Path, stack: ExitStack) -> Validator:
    """Open the evaluation sets and the reward functions, and check that every row can be scored."""
    config = model.config
    rewards = stack.enter_context(RewardManager(config.reward, out / "logs" / "rewards.log"))
    datasets = open_val_sets(config, model.tokenizer)
    rewards.check_data_sources(sources_to_score(config, *datasets.values()))
    check_truths(rewards, config, *datasets.values())
    return Validator(config, datasets, Scorer(rewards, model.tokenizer), out)


class _Shown:
    """Displays the number of finished answers, and records when the first one finished."""

    def __init__(self, since: float, progress: Progress) -> None:
        self.first_s: float | None = None
        self._since = since
        self._told = since
        self._progress = progress

    def watch(self, ended: int, total: int) -> None:
        """Display the number of finished answers."""
        now = time.monotonic()
        if ended and self.first_s is None:
            self.first_s = now - self._since
            self._progress.message(f"first answer after {self.first_s:.1f} s")
            self._told = now
        elif now - self._told >= _SHOW_S:
            self._progress.message(f"{ended} of {total} answers")
            self._told = now


def _set_results(
    config: RunConfig, name: str, batch: DataProto, metrics: Mapping[str, float], ks: Sequence[int]
) -> dict[str, Any]:
    """Return the results for one evaluation set."""
    given = val_sets(config)[name]
    prefix = f"val{tag(name)}"
    sources = list(dict.fromkeys(batch["data_source"].tolist()))
    reasons = Counter(batch["finish_reason"].tolist())
    everything = np.ones(len(batch), dtype=bool)
    found = {
        "files": list(given.files),
        "prompts": len(batch) // given.samples,
        "answers_per_prompt": given.samples,
        "sampling": asdict(given.sampling),
        "finish_reasons": dict(reasons),
        **_statistics(prefix, batch, everything, given.samples, metrics, ks),
    }
    if len(sources) > 1:
        parts = {}
        for source in sources:
            rows = batch["data_source"] == source
            of_part = f"{prefix}/{source}"
            parts[source] = {
                "prompts": int(rows.sum()) // given.samples,
                **_statistics(of_part, batch, rows, given.samples, metrics, ks),
            }
        found["data_sources"] = parts
    return found


def _statistics(
    prefix: str,
    batch: DataProto,
    rows: np.ndarray,
    samples: int,
    metrics: Mapping[str, float],
    ks: Sequence[int],
) -> dict[str, Any]:
    """Return {"statistics": {name: value and interval}} for these rows, which must include all
    answers to their prompts. Values that validation also reports are computed in the same way.
    """
    scores = batch["scores"][rows]
    extras = batch["reward_extra"][rows].tolist() if "reward_extra" in batch else None
    grid = np.asarray(scores, np.float64).reshape(-1, samples)
    first = "accuracy" if f"{prefix}/accuracy" in metrics else "score"
    by_prompt = {first: grid.mean(axis=1)}
    wanted = set(ks)
    if samples > 1:
        wanted.update(numbers_up_to(samples))
    if samples > 1 or ks:
        by_prompt |= statistics_by_prompt(scores, samples, extras, sorted(wanted))
    found: dict[str, Any] = {}
    for name, values in by_prompt.items():
        value = metrics.get(f"{prefix}/{name}", float(values.mean()))
        interval = interval_of(values)
        one: dict[str, Any] = {"value": value}
        if interval is not None:
            one["interval"] = [interval.low, interval.high]
            one["method"] = interval.method
        found[name] = one
    return {"statistics": found}


def table(results: Mapping[str, Any]) -> str:
    """Format the results of `evaluate` for the terminal."""
    rows = [("set", "prompts", "answers", "", "value", "95% interval")]
    for name, one in results["sets"].items():
        parts = {name: one}
        for source, part in one.get("data_sources", {}).items():
            parts[f"  {source}"] = part
        for label, part in parts.items():
            rows += _table_rows(label, part, one["answers_per_prompt"])
    return "\n".join(aligned(rows))


def _table_rows(label: str, part: Mapping[str, Any], answers: int) -> list[Row]:
    rows: list[Row] = []
    head = (label, str(part["prompts"]), str(answers))
    for name, one in part["statistics"].items():
        shown = ""
        if one.get("interval"):
            low, high = one["interval"]
            shown = f"{low:.4f} to {high:.4f} ({one['method']})"
        rows.append((*head, name, f"{one['value']:.4f}", shown))
        head = ("", "", "")
    return rows


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
