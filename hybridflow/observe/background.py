"""A tracker that runs in a separate process, where it cannot stop or slow down the run.

The driver puts messages into a bounded queue and never waits. A thread writes them to the process
(`hybridflow.observe.tracker_host`), which acknowledges every record. Records that are not
acknowledged by the deadline after the end of the run are lost, and are counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hybridflow.config.registry import is_user_entry
from hybridflow.observe.jsonl import number_ranges
from hybridflow.observe.trackers.base import Phase
from hybridflow.process.secret import without_credentials

_MOST_WAITING = 1000  # messages; a step has two or three
_MOST_FAULTS = 5  # distinct ones that are reported
_KILL_WAIT_S = 5.0
_log = logging.getLogger(__name__)


class Background:
    """A `Sink` that runs the tracker `name` in a separate process, which is started by the first
    message.

    Args:
        timeout_s: how long `close` waits for the tracker to record the remaining messages, in
            seconds.
    """

    def __init__(self, name: str, run_dir: Path, timeout_s: float) -> None:
        self.name = name
        self.lost: dict[Phase, list[int]] = {}  # steps by phase, set by `close`
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._messages: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._sent: dict[tuple[Phase, int], None] = {}
        self._done: set[tuple[Phase, int]] = set()
        self._faults: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._closed = False
        self._deadline = 0.0
        self.killed = False

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Send a record to the tracker."""
        # logged again after a resume: it counts once
        self._done.discard((phase, step))
        self._sent[(phase, step)] = None
        self._put("log", step=step, phase=phase, wall_time=wall_time, metrics=dict(metrics))

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Tell the tracker that records after `step` will be repeated."""
        for key in list(self._sent):
            of_phase, at = key
            if of_phase == phase and at > step:
                del self._sent[key]
        self._put("truncate", phase=phase, step=step)

    def rollouts(self, step: int, path: Path) -> None:
        """Send a dump to the tracker."""
        self._put("rollouts", step=step, path=str(path))

    def report(self, path: Path) -> None:
        """Send the report to the tracker."""
        self._put("report", path=str(path))

    def end(self) -> None:
        """Tell the tracker that no more messages follow, and start the timeout for the messages
        still queued.
        """
        if not self._closing:
            self._closing = True
            self._deadline = time.monotonic() + self._timeout_s
            with suppress(queue.Full):  # the thread sees `_closing` once the queue is empty
                self._messages.put_nowait(None)

    def close(self) -> None:
        """Wait until the tracker has finished, and kill it at its deadline. Sets `lost`."""
        self.end()
        if self._thread is None or self._closed:
            return
        self._closed = True
        self._thread.join(max(self._deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self.killed = True
            self._kill()
            self._thread.join(_KILL_WAIT_S)
        for phase, step in self._sent:
            if (phase, step) not in self._done:
                self.lost.setdefault(phase, []).append(step)

    def loss(self) -> str:
        """Return a sentence about lost records, or about a tracker that did not exit; empty if
        there is nothing to report.
        """
        if not self.lost:
            return self.killed * (
                f"tracker {self.name}: it received all records, but did not exit within "
                f"{self._timeout_s:g} s (trainer.tracker_timeout_s) and was stopped; see "
                f"{self._log_path}"
            )
        # a tracker of the user's may have no way to take them later
        again = (
            ""
            if is_user_entry(self.name)
            else f"; to resend them, run hybridflow track {self._run_dir} --to {self.name}"
        )
        count = sum(map(len, self.lost.values()))
        where = "; ".join(
            f"{phase} steps {number_ranges(steps)}" for phase, steps in self.lost.items()
        )
        return (
            f"tracker {self.name}: {count} of {len(self._sent)} records were lost ({where}); see "
            f"{self._log_path}. metrics.jsonl contains them{again}"
        )

    def _put(self, kind: str, **values: Any) -> None:
        if self._closing:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write, name=f"tracker {self.name}", daemon=True
            )
            self._thread.start()
        line = json.dumps({"kind": kind, **values}).encode() + b"\n"
        try:
            self._messages.put_nowait(line)
        except queue.Full:
            self._say("it cannot keep up, so records are skipped now and sent at the end")

    def _say(self, fault: str) -> None:
        if fault not in self._faults and len(self._faults) < _MOST_FAULTS:
            self._faults.add(fault)
            _log.warning("tracker %s: %s (the run continues)", self.name, fault)

    @property
    def _log_path(self) -> Path:
        return self._run_dir / "logs" / f"tracker-{Path(self.name).name.replace(':', '-')}.log"

    # ---- in the thread

    def _write(self) -> None:
        try:
            process = self._process = self._start()
        except OSError as error:
            self._say(f"its process did not start: {error}")
            return
        assert process.stdin is not None and process.stdout is not None
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while (line := self._next()) is not None:
                process.stdin.write(line)
                process.stdin.flush()
            # not the end of the stream, because processes forked by the driver may keep it open
            process.stdin.write(b'{"kind": "end"}\n')
            process.stdin.close()
        except OSError:  # it has exited
            with suppress(OSError):
                process.stdin.close()
        if process.wait():
            self._say(f"its process exited with status {process.returncode}; see {self._log_path}")
        reader.join(_KILL_WAIT_S)

    def _next(self) -> bytes | None:
        """Return the next message, or None at the end, even if the queue had no room for the end
        marker.
        """
        while True:
            try:
                return self._messages.get(timeout=0.5)
            except queue.Empty:
                if self._closing:
                    return None

    def _start(self) -> subprocess.Popen[bytes]:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "hybridflow.observe.tracker_host"]
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [*command, self.name, str(self._run_dir), str(self._timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**without_credentials(), "OMP_NUM_THREADS": "1"},
                # an interrupt from the terminal is for the driver, which then closes this process
                start_new_session=True,
            )

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            answer = json.loads(line)
            if "fault" in answer:
                self._say(answer["fault"])
            else:
                self._done.add((answer["phase"], answer["step"]))

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # with the processes that its library started
                os.killpg(self._process.pid, signal.SIGKILL)
