"""The process in which a tracker runs (see `hybridflow.observe.background`). It reads messages from
standard input, one JSON object per line, and acknowledges each record on standard output. If the
driver is killed, this process continues until its deadline, to record the remaining messages.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybridflow.config.entries import TRACKERS
from hybridflow.observe.printable import printable
from hybridflow.observe.trackers.base import CatchesUp, ShowsRollouts, Sink

_POLL_S = 1.0
_CHUNK = 1 << 16


def main(name: str, run_dir: str, timeout_s: float) -> int:
    """Run one tracker until the end of the input. Returns 1 if the tracker could not be started."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # also sent to all of a job's processes at its end
        signal.signal(number, signal.SIG_IGN)
    answers = Answers()
    made: list[Sink] = []
    with answers.guarded("it did not start"):
        made.append(TRACKERS.get(name).make(Path(run_dir)))
    if not made:
        return 1
    sink = made[0]
    for message in messages(os.getppid()):
        with answers.guarded(_about(message)):
            if message["kind"] == "log":
                _log(sink, message)
                answers.done(message["phase"], message["step"])
            else:
                _other(sink, message)
    # the kernel ends a process that hangs in its library, when no driver is left to do it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(max(int(timeout_s), 1))
    with answers.guarded("at the end"):
        if isinstance(sink, CatchesUp):
            for phase, step in sink.catch_up():
                answers.done(phase, step)
    with answers.guarded("at the end"):
        sink.close()
    return 0


class Answers:
    """Sends replies to the driver on the original standard output. Library output is redirected to
    stderr.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def done(self, phase: str, step: int) -> None:
        """Acknowledge a record."""
        self._say(phase=phase, step=step)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Context manager that reports an error raised by a library or by user code, and
        continues.
        """
        try:
            yield
        except Exception as error:
            self._say(fault=f"{what}: {type(error).__name__}: {printable(str(error))[:500]}")

    def _say(self, **values: Any) -> None:
        with suppress(OSError):  # the driver was killed
            print(json.dumps(values), file=self._file, flush=True)


def _about(message: dict[str, Any]) -> str:
    parts = (message.get("phase", message["kind"]), "step", message.get("step", ""))
    return " ".join(map(str, parts)) if "step" in message else message["kind"]


def _log(sink: Sink, message: dict[str, Any]) -> None:
    sink.log(message["step"], message["phase"], message["wall_time"], message["metrics"])


def _other(sink: Sink, message: dict[str, Any]) -> None:
    if message["kind"] == "truncate":
        sink.truncate_after(message["phase"], message["step"])
    elif isinstance(sink, ShowsRollouts):
        path = Path(message["path"])
        if message["kind"] == "report":
            sink.report(path)
        elif path.exists():  # a resume may have removed it since
            sink.rollouts(message["step"], path)


def messages(parent: int) -> Iterator[dict[str, Any]]:
    """Yield messages until the message `end` arrives or the process `parent` has exited. The end of
    the input alone is not reliable, because processes forked by the driver may keep it open.
    """
    left = b""
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_S)
        if not ready:
            if os.getppid() != parent:
                return
            continue
        chunk = os.read(0, _CHUNK)
        if not chunk:
            return
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            if (message := json.loads(line))["kind"] == "end":
                return
            yield message


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
