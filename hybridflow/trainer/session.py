"""The records of a running job: metrics, timeline, progress, checkpoints, and totals for its
summary."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybridflow.config import derived
from hybridflow.config.load import dump_yaml
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, HybridFlowError, RunStopped, naming
from hybridflow.observe import spans
from hybridflow.observe.environment import write_environment
from hybridflow.observe.exporter import Exporter
from hybridflow.observe.jsonl import JsonlWriter, finite, number_ranges, read_jsonl
from hybridflow.observe.progress import Progress
from hybridflow.observe.rollouts import remove_dumps_after
from hybridflow.observe.run_folder import CHANGES
from hybridflow.observe.timeline import WHOLE_STEP, Timeline, read_timeline
from hybridflow.observe.tracker import Tracker
from hybridflow.observe.trackers.base import Phase
from hybridflow.saving.fingerprint import TRAINED_ON, Fingerprint
from hybridflow.saving.store import Checkpoint, CheckpointStore, Retention
from hybridflow.single_controller import waited_seconds
from hybridflow.trainer.folder import keep_config

_TRACKER_PHASE: dict[str, Phase] = {"sft": "sft", "rl": "train", "reward": "reward"}


class Session:
    """State of the current run and its folder.

    Attributes:
        totals: values accumulated over the run and saved in checkpoints: seconds spent in each
            phase, accuracies, minima and maxima.
        controller_share: see `controlled`.
        latest: {phase: number and metrics of the last recorded step}.
        stop_asked: True to save a checkpoint after the current step and stop the run (SIGUSR1).
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder = derived.run_dir(config)
        port = config.trainer.prometheus_port
        # `progress` replaces the console tracker
        self.tracker = Tracker(
            self.folder,
            [name for name in config.trainer.loggers if name != "console"],
            config.trainer.tracker_timeout_s,
            Exporter(config.name, port) if port is not None else None,
        )
        self.timeline = Timeline(self.folder / "timeline.jsonl")
        self._spans = spans.record_to(self.folder / "logs" / f"driver{spans.SUFFIX}", "driver")
        self.store = CheckpointStore(
            self.folder / "checkpoints",
            Retention(
                config.trainer.max_checkpoints_to_keep, config.trainer.keep_checkpoint_every_steps
            ),
            background=config.trainer.async_checkpoints,
            timeout_s=config.trainer.checkpoint_timeout_s,
        )
        self.totals: dict[str, float] = {}
        self._opened = time.perf_counter()
        self._seconds_before = 0.0
        self.controller_share = 0.0
        self.stop_asked = False
        self.latest: dict[Phase, dict[str, float]] = {}
        self._known = False  # True once the run folder contains this run's files

    @contextmanager
    def timed(self, total: str) -> Iterator[None]:
        """Add the seconds spent in the block to `totals[total]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.totals[total] = self.totals.get(total, 0.0) + time.perf_counter() - start

    @contextmanager
    def controlled(self) -> Iterator[None]:
        """Set `controller_share` to the fraction of the time spent in the block during which the
        driver was not waiting for a worker or an engine."""
        start = time.perf_counter()
        waited = waited_seconds()
        yield
        self.controller_share = 1.0 - (waited_seconds() - waited) / max(
            time.perf_counter() - start, 1e-9
        )

    def totals_now(self) -> dict[str, float]:
        """Return the totals, including `seconds_total`, the total duration of all sessions of this
        run, excluding time lost when a session was killed.
        """
        self.totals["seconds_total"] = self._seconds_before + time.perf_counter() - self._opened
        return dict(self.totals)

    def note_max(self, total: str, value: float) -> None:
        """Set `totals[total]` to the maximum of its value and `value`."""
        self.totals[total] = max(self.totals.get(total, value), value)

    def note_restart(
        self, total: str, say: Callable[[str], None], prefix: str = ""
    ) -> Callable[[str], None]:
        """Return a function that counts restarts in `totals[total]` and reports each reason,
        preceded by `prefix`."""

        def note(reason: str) -> None:
            self.totals[total] = self.totals.get(total, 0.0) + 1
            say(prefix + reason)

        return note

    def progress(self, total: int, title: str, initial: int, throttle_s: float = 0.0) -> Progress:
        """Return a progress bar, shown on the terminal if `trainer.loggers` contains console."""
        enabled = "console" in self.config.trainer.loggers
        return Progress(total, title, initial=initial, throttle_s=throttle_s, enabled=enabled)

    # ---- checkpoints

    def know(
        self,
        fingerprint: Fingerprint,
        checkpoint: Checkpoint | None,
        hf_config: Mapping[str, Any],
    ) -> list[str]:
        """Save the configuration, the environment and the run's fingerprint. If an earlier start
        used another configuration, its file is kept. Returns one line for each difference from the
        checkpoint that the run resumes from.

        Raises:
            ConfigError: the checkpoint was trained on different data; nothing is changed.
            CheckpointError: a part of the checkpoint is missing or belongs to another checkpoint,
                or its weights are those of another model than `hf_config`; nothing is changed.
        """
        if checkpoint is not None:
            checkpoint.check_parts()
            checkpoint.check_model(hf_config, self.config.actor.backend)
        self.store.fingerprint = fingerprint
        changes = fingerprint.changes(checkpoint.fingerprint) if checkpoint is not None else []
        if (
            checkpoint is not None
            and self.has_other_data(checkpoint)
            and not self.config.trainer.resume_with_other_data
        ):
            of_data = [line for line in changes if line.startswith(TRAINED_ON[checkpoint.phase])]
            raise ConfigError(
                f"{'; '.join(of_data)}: {checkpoint.folder} was trained on different rows. Restore "
                "the data, start a new run with another name=..., or continue with the new data "
                "from its first row: trainer.resume_with_other_data=true"
            )
        (self.folder / "summary.json").unlink(missing_ok=True)
        keep_config(self.folder, dump_yaml(self.config))
        write_environment(self.folder)
        self._known = True
        if checkpoint is not None and changes:
            writer = JsonlWriter(self.folder / CHANGES)
            writer.write({"phase": checkpoint.phase, "step": checkpoint.step, "changes": changes})
            writer.close()
        return changes

    def has_other_data(self, checkpoint: Checkpoint) -> bool:
        """Return True if the checkpoint's data position refers to different rows than this
        run's.
        """
        return self.store.fingerprint.has_other_data(checkpoint.fingerprint, checkpoint.phase)

    def lost_records(self, checkpoint: Checkpoint | None) -> list[str]:
        """Return one line for each record file that lacks steps from before the checkpoint. Those
        steps are not rerun, so their records stay missing. A linked checkpoint is not checked,
        because its records are in another folder.
        """
        if checkpoint is None or checkpoint.folder.is_symlink():
            return []
        phase = _TRACKER_PHASE[checkpoint.phase]
        found: dict[str, set[Any]] = {}
        if "jsonl" in self.config.trainer.loggers:
            records = read_jsonl(self.folder / "metrics.jsonl")
            found["metrics.jsonl"] = {
                record.get("step") for record in records if record.get("phase") == phase
            }
        if phase == "train":
            spans = read_timeline(self.folder / "timeline.jsonl")
            found["timeline.jsonl"] = {
                span.get("step") for span in spans if span["name"] == WHOLE_STEP
            }
        return [
            (
                f"{self.folder / name} has no record of {phase} step {number_ranges(lost)}, "
                f"although the run resumes from {checkpoint.folder.name}: records were lost, and "
                "charts and sums omit these steps"
            )
            for name, steps in found.items()
            if (lost := [step for step in range(1, checkpoint.step + 1) if step not in steps])
        ]

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase = "train") -> None:
        """Record the metrics of one step, after checking that the run folder still exists."""
        self.check_folder()
        self.latest[phase] = {"step": step, **metrics}
        self.tracker.log(step, metrics, phase)

    def check_folder(self) -> None:
        """Check that the run folder still exists, because records would otherwise be written to a
        moved folder or lost.

        Raises:
            HybridFlowError: the run folder has been renamed, moved or emptied since `know` was
                called.
        """
        if self._known and not any(
            (self.folder / name).exists() for name in ("config.yaml", "timeline.jsonl")
        ):
            raise HybridFlowError(
                f"{self.folder} no longer exists: it was renamed, moved or emptied during the run, "
                "so the run was stopped. Restore it and run the same command again to resume from "
                "the last checkpoint"
            )

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """Load the totals of a checkpoint and drop the records written after it, so that no step is
        recorded twice. Without a checkpoint, drop all records of an earlier attempt."""
        if checkpoint is None:
            self.tracker.truncate_after("sft", 0)
            self.tracker.truncate_after("reward", 0)
            return self._forget_after(0)
        with checkpoint.restoring():
            totals = checkpoint.state["totals"].items()
            self.totals = {
                name: math.nan if value is None else float(value) for name, value in totals
            }
        self._seconds_before = self.totals.get("seconds_total", 0.0)
        if checkpoint.phase == "sft":
            self.tracker.truncate_after("sft", checkpoint.step)
        self.tracker.truncate_after(
            "reward", checkpoint.step if checkpoint.phase == "reward" else 0
        )
        return self._forget_after(checkpoint.step if checkpoint.phase == "rl" else 0)

    def go_back(self, checkpoint: Checkpoint | None) -> None:
        """Resume within the current session. Unlike in `resume`, elapsed time is still counted, and
        `totals["restarts"]` is incremented. Without a checkpoint, return to the state before the
        first step.
        """
        seconds = self.totals_now()["seconds_total"]
        restarts = self.totals.get("restarts", 0.0)
        engine_restarts = self.totals.get("engine_restarts", 0.0)
        self.totals = {}
        self.resume(checkpoint)
        self._seconds_before = seconds
        self._opened = time.perf_counter()
        self.totals["restarts"] = restarts + 1
        self.totals["engine_restarts"] = engine_restarts

    def _forget_after(self, step: int) -> None:
        """Drop the loop's records and dumps after `step`; if it is 0, also drop the records and
        dumps of the validation before the first step.
        """
        last_validated = step if step > 0 else -1
        self.tracker.truncate_after("train", step)
        self.tracker.truncate_after("val", last_validated)
        self.timeline.truncate_after(step)
        for folder in self.folder.glob("rollouts*"):  # of additional policies too
            remove_dumps_after(folder, step)
        for folder in self.folder.glob("validation*"):
            remove_dumps_after(folder, last_validated)

    def is_due(self, every: int, step: int) -> bool:
        """Return True if an event that occurs every `every` steps (0: never) is due."""
        return every > 0 and step % every == 0

    async def stop_if_asked(self) -> None:
        """Stop the run if requested. Call it after a step and its checkpoint.

        Raises:
            RunStopped: `stop_asked` is set; the checkpoint has been written.
        """
        if self.stop_asked:
            await self.store.wait()
            latest = self.store.latest()
            where = latest.folder if latest else self.folder
            raise RunStopped(f"stopped as requested; the same command resumes from {where}")

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Atomically write a small JSON file to the run folder. Non-finite numbers become null."""
        path = self.folder / name
        temporary = path.with_name(path.name + ".tmp")
        with naming(path):
            temporary.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")
        os.replace(temporary, path)
        return path

    def close(self) -> None:
        """Flush and close the records. An incomplete checkpoint is discarded."""
        self.store.settle()
        self.tracker.close_files()
        self.timeline.close()
        self._spans.close()

    def end_tracking(self, say: Callable[[str], None]) -> None:
        """Close the trackers once the report is written, and report any records that they have
        lost.
        """
        with suppress(OSError):
            for line in self.tracker.close():
                say(line)
