"""Named in `trainer.loggers` of a disturbed run: writes what the driver begins and ends to a file
`moments`.

It is loaded as a user's tracker and keeps no metrics. A line of the file is `begin|end NAME STEP
TIME`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.observe.progress import Progress
from hybridflow.observe.timeline import Timeline
from hybridflow.observe.trackers.base import Phase, tracker
from hybridflow.trainer.supervised import SftTrainer


@tracker("announcer", in_driver=True)
class Announcer:
    """The tracker: nothing to record."""

    def __init__(self, run_dir: Path) -> None:
        # outside of the file system of the run folder, which may be full
        file = os.open(
            run_dir.parents[1] / "moments", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600
        )

        def say(word: str, name: str, step: int | None) -> None:
            os.write(
                file, f"{word} {name.replace(' ', '_')} {step or 0} {time.time():.6f}\n".encode()
            )

        _announce(say)

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _announce(say: Callable[[str, str, int | None], None]) -> None:
    phase = Timeline.phase
    stage = Progress.stage
    fit = SftTrainer.fit
    step = [0]

    @contextmanager
    def announced_phase(self: Timeline, name: str, at: int | None = None) -> Iterator[None]:
        step[0] = at or step[0]
        say("begin", name, step[0])
        with phase(self, name, at):
            yield
        say("end", name, step[0])

    @contextmanager
    def announced_stage(self: Progress, title: str) -> Iterator[None]:
        say("begin", title, None)
        with stage(self, title):
            yield
        say("end", title, None)

    async def announced_fit(self: SftTrainer, *args: Any) -> None:
        say("begin", "warm start", None)
        await fit(self, *args)
        say("end", "warm start", None)

    Timeline.phase = announced_phase  # type: ignore[method-assign]
    Progress.stage = announced_stage  # type: ignore[method-assign]
    SftTrainer.fit = announced_fit  # type: ignore[method-assign]
