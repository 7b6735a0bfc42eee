"""Stops of a run: where the program that started it does something between two steps, or inside of
one that it makes by hand."""

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
    """The stops of one run, and its parts once they are there.

    Attributes:
        enabled: False where the run goes through to its end, as on the command line.
        is_in_step: whether the run has stopped inside a step, for `by_hand`.
        finish: writes summary and report, and returns the summary.
        summary: the result, from the last stop on.
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
        """Wait until the program goes on."""
        if not self.enabled:
            return
        self._released.clear()
        self._reached.set()
        await self._released.wait()

    async def by_hand(self, run: Run) -> None:
        """A flow whose steps the program makes."""
        async for _ in run.steps():
            self.is_in_step = True
            await self.stop()
            self.is_in_step = False

    def follow(self, work: Coroutine[Any, Any, T]) -> Steps[T]:
        """The result of the work, done in this thread's event loop; yields at each stop. The work
        is cancelled when the generator is closed."""
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
        """Wait for the next stop, or the end."""
        reached = asyncio.ensure_future(self._reached.wait())
        await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()

    def end(self, summary: Mapping[str, Any]) -> Steps[None]:
        """The last stop, with the parts of the run still there."""
        if self.enabled:
            self.summary = self.finish(summary)
            yield
