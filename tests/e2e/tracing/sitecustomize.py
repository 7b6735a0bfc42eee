"""Records the files of the package that a run's processes enter in one step. Imported by every
Python that starts with this folder on PYTHONPATH.

Byte 0 of the file `$TRACED/journey` is the current journey, shared by all processes: 1 a prompt's,
2 a weight's, 3 that of the first weights, which opens the sessions, 0 none. The driver sets it when
it enters certain functions and phases. Each process appends the files that it enters to
`$TRACED/PID`: `JOURNEY call FILE`, or `JOURNEY resume FILE` for a coroutine or generator that goes
on where it stood.
"""

from __future__ import annotations

import dis
import functools
import inspect
import mmap
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

STEP = 2
PROMPT = 1
WEIGHT = 2
FIRST_WEIGHTS = 3


_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@functools.cache
def begin_of(code: CodeType) -> int:
    """The place in a coroutine's or generator's code where it begins: its first RESUME."""
    return next(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")


class Tracer:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        with open(os.path.join(folder, "journey"), "rb+") as file:
            self.journey = mmap.mmap(file.fileno(), 1)
        self.seen: set[tuple[int, str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_flags & _RESUMABLE and frame.f_lasti > begin_of(code):
            return self.note("resume", code.co_filename)
        if "/hybridflow/observe/" in code.co_filename:
            self.set_journey(code.co_name, frame.f_locals)
        elif code.co_name in ("prepare", "sync") and code.co_filename.endswith(
            "/rollout/weight_sync.py"
        ):
            self.journey[0] = self.journey[0] or FIRST_WEIGHTS
        self.note("call", code.co_filename)

    def note(self, how: str, name: str) -> None:
        """Write a file of the package down, once for each journey and way to enter it."""
        journey = self.journey[0]
        entry = (journey, how, name)
        if journey and "/hybridflow/" in name and entry not in self.seen:
            self.seen.add(entry)
            with open(os.path.join(self.folder, str(os.getpid())), "a", encoding="utf-8") as file:
                file.write(f"{journey} {how} {name}\n")

    def set_journey(self, name: str, found: dict[str, Any]) -> None:
        """Follow the driver's timeline: its phases begin in `Timeline.begin` and end in
        `Span.end`."""
        if name == "begin" and found.get("name") == "step":
            self.journey[0] = PROMPT if found.get("step") == STEP else 0
        elif (
            name == "begin" and found.get("name") == "update_weights" and self.journey[0] == PROMPT
        ):
            self.journey[0] = WEIGHT
        elif name == "end" and self.journey[0] in (PROMPT, WEIGHT):
            span = getattr(found.get("self"), "name", "")
            self.journey[0] = {"step": 0, "update_weights": PROMPT}.get(span, self.journey[0])


if folder := os.environ.get("TRACED"):
    tracer = Tracer(folder)
    sys.setprofile(tracer)
    threading.setprofile(tracer)
