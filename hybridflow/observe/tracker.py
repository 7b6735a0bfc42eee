"""Metrics of a run, sent to `metrics.jsonl`, TensorBoard and the console.

`metrics.jsonl` holds one flat object a line: `{"step": 3, "phase": "train", "wall_time": 1700000000.0,
"critic/score/mean": 0.5, ...}`. A value that is NaN or infinite is written as null, and the line gets a `"warning"`
that names it.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from hybridflow.errors import ConfigError
from hybridflow.observe.jsonl import JsonlWriter, read_jsonl
from hybridflow.observe.tensorboard import TensorBoardWriter

Phase = Literal["train", "val", "sft", "reward"]
PHASES: tuple[Phase, ...] = ("train", "val", "sft", "reward")
RESERVED = frozenset({"step", "phase", "wall_time", "warning"})
# What the console line shows, in this order; a phase with none of them shows everything.
CONSOLE_KEYS = (
    "critic/score/mean",
    "val/score",
    "sft/loss",
    "reward/loss",
    "reward/accuracy",
    "actor/pg_loss",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
    "rollout/logprob_diff/mean",
    "timing_s/step",
    "sft/grad_norm",
    "sft/lr",
)


class _Sink(Protocol):
    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None: ...
    def truncate_after(self, phase: Phase, step: int) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Sends metrics to the chosen loggers.

    Args:
        run_dir: the run folder; `metrics.jsonl` and `tensorboard/` are made in it when first written.
        loggers: any of console, jsonl, tensorboard.
        console: takes the console's lines. None prints none: for a run whose `Progress` shows the same.
    """

    def __init__(
        self,
        run_dir: str | Path,
        loggers: Sequence[str] = ("console", "jsonl", "tensorboard"),
        console: Callable[[str], None] | None = print,
    ) -> None:
        run_dir = Path(run_dir)
        build: dict[str, Callable[[], _Sink]] = {
            # jsonl first: TensorBoard is rebuilt from it on resume.
            "jsonl": lambda: _JsonlSink(run_dir / "metrics.jsonl"),
            "tensorboard": lambda: _TensorBoardSink(run_dir / "tensorboard", run_dir / "metrics.jsonl"),
            "console": lambda: _ConsoleSink(console),
        }
        for name in loggers:
            if name not in build:
                near = difflib.get_close_matches(name, build, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"trainer.loggers: no logger named {name!r}; did you mean {near!r}? Available: "
                    f"{', '.join(sorted(build))}"
                )
        self._sinks = [make() for name, make in build.items() if name in loggers]

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase = "train") -> None:
        """Record the metrics of one step. Numbers only; numpy and torch scalars are welcome."""
        _check_phase(phase)
        if reserved := RESERVED & metrics.keys():
            raise ValueError(f"a metric cannot be named {sorted(reserved)[0]!r}")
        values = {name: _number(name, value) for name, value in metrics.items()}
        wall_time = time.time()
        for sink in self._sinks:
            sink.log(int(step), phase, wall_time, values)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Forget the phase's records later than `step`: called on resume, so that steps made again are not recorded
        twice."""
        _check_phase(phase)
        for sink in self._sinks:
            sink.truncate_after(phase, step)

    def close(self) -> None:
        """Flush and close the files."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _JsonlSink:
    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        odd = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        record: dict[str, object] = {
            "step": step,
            "phase": phase,
            "wall_time": round(wall_time, 3),
            **metrics,
            **dict.fromkeys(odd),
        }
        if odd:
            record["warning"] = "not finite: " + ", ".join(f"{name}={value}" for name, value in odd.items())
        self._writer.write(record)

    def truncate_after(self, phase: Phase, step: int) -> None:
        self._writer.keep(lambda record: record.get("phase") != phase or record.get("step", 0) <= step)

    def close(self) -> None:
        self._writer.close()


class _TensorBoardSink:
    def __init__(self, folder: Path, metrics_path: Path) -> None:
        self._writer = TensorBoardWriter(folder)
        self._metrics_path = metrics_path

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        self._writer.add(step, wall_time, metrics)

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Rebuild from metrics.jsonl, which is already cut; without that file TensorBoard itself drops what is logged
        again."""
        if self._metrics_path.exists():
            self._writer.replace_all(
                (
                    record["step"],
                    record["wall_time"],
                    {name: _or_nan(value) for name, value in record.items() if name not in RESERVED},
                )
                for record in read_jsonl(self._metrics_path)
                if "step" in record and "wall_time" in record
            )

    def close(self) -> None:
        self._writer.close()


class _ConsoleSink:
    def __init__(self, write: Callable[[str], None] | None) -> None:
        self._write = write

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        if self._write is not None:
            shown = [name for name in CONSOLE_KEYS if name in metrics] or list(metrics)
            self._write(f"{phase} step {step}  " + "  ".join(f"{name} {metrics[name]:.4g}" for name in shown))

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Nothing to take back: what was printed was printed."""

    def close(self) -> None:
        """Nothing is open."""


def _check_phase(phase: str) -> None:
    if phase not in PHASES:
        raise ValueError(f"no phase named {phase!r}; phases are {', '.join(PHASES)}")


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is not a number: {value!r}") from error


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
