"""Points at which a run returns control to the program that started it: between two steps, or
inside a step that the program runs by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hybridflow.single_controller import begin, block_on, cancel_all

if TYPE_CHECKING:
    from hybridflow.flows.base import Run
    from hybridflow.trainer.job import Job
    from hybridflow.trainer.loop import RLTrainer

T = TypeVar("T")
Steps = Generator[None, None, T]


@dataclass
class Stops:
    """State of a run's stops, and the run's components once they exist.

    Attributes:
        enabled: False if the run never stops early, as when started from the command line.
        is_in_step: True if the run has stopped inside a step, for `by_hand`.
        finish: writes the summary and the report, and returns the summary.
        summary: the result, set at the last stop.
    """

    enabled: bool = False
    is_in_step: bool = False
    job: Job | None = None
    trainer: RLTrainer | None = None
    finish: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    summary: dict[str, Any] | None = None
    _reached: asyncio.Event = field(default_factory=asyncio.Event)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        """Hand control to the program, and wait until it continues the run."""
        if not self.enabled:
            return
        self._released.clear()
        self._reached.set()
        await self._released.wait()

    async def by_hand(self, run: Run) -> None:
        """A flow whose steps are run by the user's program."""
        async for _ in run.steps():
            self.is_in_step = True
            await self.stop()
            self.is_in_step = False

    def follow(self, work: Coroutine[Any, Any, T]) -> Steps[T]:
        """Run the work in this thread's event loop, yield at each stop, and return the work's
        result. Closing the generator cancels the work."""
        task = begin(work)
        try:
            while True:
                block_on(self._next(task))
                if task.done():
                    return task.result()
                self._reached.clear()
                yield
                self._released.set()
        finally:
            if not task.done():
                cancel_all([task])

    async def _next(self, task: asyncio.Task[T]) -> None:
        """Wait for the next stop, or for the end of the run."""
        reached = asyncio.ensure_future(self._reached.wait())
        await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()

    def end(self, summary: Mapping[str, Any]) -> Steps[None]:
        """Stop for the last time, while the run's components still exist."""
        if self.enabled:
            self.summary = self.finish(summary)
            yield
