"""Bookkeeping for one engine: requests in flight, in its streams or in a thread that calls
`generate`, results of finished requests, and the engine's busy time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import (
    Asking,
    Completion,
    Engine,
    Extras,
    PromptImages,
    Streams,
    TokenRequests,
    Told,
)
from hybridflow.engines.supervisor import BusyClock
from hybridflow.errors import EngineError

CUT_SHORT = "cut short"  # finish reason of a response left incomplete because its engine was lost
_NOTHING = Completion([], [], "abort", ())


@dataclass(frozen=True)
class Ended:
    """The result of a request that finished in the engine or was cut short."""

    ticket: int
    prompt_tokens: int
    extras: Extras
    completion: Completion


@dataclass(eq=False)
class _Part:
    """Requests sent to the engine in one call. `aborted` contains responses that the engine aborted
    without being asked to. They are withheld until the whole call is done, because only then is it
    known whether the engine was shutting down.
    """

    tickets: Sequence[int]
    requests: TokenRequests
    open: set[int]
    start: int = -1
    given_up: bool = False
    aborted: dict[int, Completion] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)  # `EngineRequests.abort` was called for these
    asking: Asking | None = None


class EngineRequests:
    """All requests of one engine. Safe to use from the worker's thread and the engine's thread.

    Attributes:
        clock: the engine's busy time.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: list[_Part] = []
        self._ended: list[Ended] = []
        self.clock = BusyClock()

    def take_load(self) -> dict[str, float]:
        """Return tokens per second and the idle share since the last call (`BusyClock.take`)."""
        with self._changed:
            return self.clock.take()

    def ask(
        self, engine: Engine, start: int, tickets: Sequence[int], requests: TokenRequests
    ) -> None:
        """Send requests to the engine.

        `start` is the number of times that the engine has been restarted. Raises EngineError if the
        engine rejects the requests.
        """
        part = _Part(tickets, requests, set(range(len(tickets))), start)
        with self._changed:
            self._parts.append(part)
            self._note_busy()
        try:
            told = partial(self._told, part)
            if isinstance(engine, Streams):
                part.asking = engine.ask(requests, told)
            else:
                part.asking = _InThread(engine, requests, told)
        except BaseException:
            self._forget(part)
            raise
        part.asking.done.add_done_callback(lambda _: self._wake())

    def refuse(self, tickets: Sequence[int], requests: TokenRequests) -> None:
        """Finish requests as `CUT_SHORT` without sending them to an engine."""
        part = _Part(tickets, requests, set(range(len(tickets))))
        with self._changed:
            for number in range(len(tickets)):
                self._end(part, number, Completion([], [], CUT_SHORT, ()))

    def wait(self, seconds: float) -> None:
        """Wait until nothing is in flight, a request has failed, or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._parts or any(map(_is_done, self._parts)), seconds
            )

    def failed(self) -> tuple[BaseException, int] | None:
        """Return an error that left requests unfinished, and how often the engine had been
        restarted when they were sent. Returns None if there is no such error.
        """
        with self._changed:
            for part in [part for part in self._parts if _is_done(part)]:
                assert part.asking is not None
                if (error := part.asking.done.exception()) is None:
                    for number, completion in sorted(part.aborted.items()):
                        self._end(part, number, completion)
                    self._parts.remove(part)
                elif part.given_up:
                    self._cut_short(part)
                else:
                    return error, part.start
        return None

    def cut_short(self, start: int) -> None:
        """Finish all failed requests that were sent after restart `start` of the engine, keeping
        the tokens received so far.
        """
        with self._changed:
            for part in [part for part in self._parts if _is_done(part) and part.start == start]:
                self._cut_short(part)

    def abort(self, tickets: Collection[int]) -> None:
        """Abort these requests in the engine.

        Returns once the engine has been notified. Each request finishes with the tokens generated
        so far and the finish reason `abort`, unless it finishes on its own first.
        """
        wanted: list[tuple[Asking, list[int]]] = []
        with self._changed:
            for part in self._parts:
                numbers = [
                    number for number in sorted(part.open) if part.tickets[number] in tickets
                ]
                part.unwanted |= set(numbers)
                for number in [number for number in numbers if number in part.aborted]:
                    self._end(part, number, part.aborted.pop(number))
                if part.asking is not None and part.open & part.unwanted:
                    wanted.append(
                        (part.asking, [number for number in numbers if number in part.open])
                    )
        for asking, numbers in wanted:  # not under the lock: `_told` acquires it
            asking.abort(numbers)

    def give_up(self) -> None:
        """Abort everything in flight in the engine. Unfinished requests are cut short."""
        with self._changed:
            parts = list(self._parts)
        for part in parts:
            part.given_up = True
            if part.asking is not None:
                part.asking.give_up()

    def forget(self) -> None:
        """Abort everything in flight and discard all results, including finished ones."""
        self.give_up()
        with self._changed:
            self._parts = []
            self._ended = []
            self._note_busy()

    def take(self, extras: Extras) -> list[Ended]:
        """Return the requests with these extras that have finished since the last call."""
        with self._changed:
            taken = [one for one in self._ended if one.extras == extras]
            self._ended = [one for one in self._ended if one.extras != extras]
        return taken

    def so_far(self, extras: Extras) -> list[Ended]:
        """Return partial results of uncollected requests with these extras. The requests
        keep running. Unfinished ones get the finish reason `CUT_SHORT`.
        """
        with self._changed:
            found = [one for one in self._ended if one.extras == extras]
            parts = [part for part in self._parts if part.requests.extras == extras]
            for part in [part for part in parts if part.asking is not None]:
                assert part.asking is not None
                for number in sorted(part.open):
                    answer = part.asking.so_far(number)
                    if answer.finish_reason == "abort":
                        answer = replace(answer, finish_reason=CUT_SHORT)
                    elif extras.routes:
                        continue  # finishing right now; its experts are not available yet
                    found.append(
                        Ended(
                            part.tickets[number], len(part.requests.prompts[number]), extras, answer
                        )
                    )
        return [
            one
            for one in found
            if len(one.completion.token_ids) or one.completion.finish_reason != CUT_SHORT
        ]

    # ---- called with the lock held, or from the engine's thread

    def _told(self, part: _Part, number: int, completion: Completion) -> None:
        with self._changed:
            if part not in self._parts:
                return  # discarded by `forget`
            if completion.finish_reason == "abort" and number not in part.unwanted:
                part.aborted[number] = completion
            else:
                self._end(part, number, completion)

    def _end(self, part: _Part, number: int, completion: Completion) -> None:
        part.open.discard(number)
        self.clock.tokens += len(completion.token_ids)
        self._note_busy()
        asked = part.requests
        self._ended.append(
            Ended(part.tickets[number], len(asked.prompts[number]), asked.extras, completion)
        )

    def _cut_short(self, part: _Part) -> None:
        assert part.asking is not None
        for number in sorted(part.open):
            so_far = part.aborted.get(number) or part.asking.so_far(number)
            is_cut = so_far.finish_reason == "abort" and number not in part.unwanted
            reason = CUT_SHORT if is_cut else so_far.finish_reason
            self._end(part, number, replace(so_far, finish_reason=reason))
        self._parts.remove(part)

    def _forget(self, part: _Part) -> None:
        with self._changed:
            self._parts.remove(part)
            self._note_busy()

    def _note_busy(self) -> None:
        self.clock.note(any(part.open for part in self._parts))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _is_done(part: _Part) -> bool:
    return part.asking is not None and part.asking.done.done()


def generated(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    most: int,
    stop_token_ids: Sequence[int],
    extras: Extras,
    images: Sequence[PromptImages] = (),
) -> list[Completion]:
    """Call `Engine.generate`, omitting the keyword arguments for extras that were not requested and
    for images if there are none.

    Raises:
        EngineError: supports were requested, but a response does not include them.
    """
    wanted: dict[str, Any] = {}
    for name, value in extras._asdict().items():
        if value:
            wanted[f"with_{name}"] = True
    if images:
        wanted["images"] = images
    found = engine.generate(prompts, sampling, most, stop_token_ids, **wanted)
    if extras.support and any(one.support is None for one in found):
        raise EngineError(
            "a response does not include the requested sampling support", engine=engine.spec.name
        )
    return found


class _InThread:
    """Requests in flight, executed by calls to `generate` in a separate thread, one call per length
    limit.
    """

    def __init__(self, engine: Engine, requests: TokenRequests, told: Told) -> None:
        self._engine = engine
        self._requests = requests
        self._told = told
        self._begun: dict[int, Completion] = {}
        self._aborted: set[int] = set()
        self._lock = threading.Lock()
        self.done: Future[None] = Future()
        threading.Thread(target=self._run, name=f"generate-{engine.spec.name}", daemon=True).start()

    def so_far(self, number: int) -> Completion:
        return self._begun.get(number, _NOTHING)

    def abort(self, numbers: Sequence[int]) -> None:
        """Cancel these prompts if their call to `generate` has not started yet. A running
        `generate` cannot be aborted.
        """
        self._aborted |= set(numbers)

    def give_up(self) -> None:
        self._end(EngineError("the requests were aborted", engine=self._engine.spec.name))

    def _run(self) -> None:
        try:
            for limit in sorted(set(self._requests.max_new_tokens)):
                self._generate(limit)
        except Exception as error:  # any error must reach the waiting caller
            self._end(error)
        else:
            self._end(None)

    def _generate(self, limit: int) -> None:
        asked = self._requests
        aborted = set(self._aborted)
        numbers = [number for number, most in enumerate(asked.max_new_tokens) if most == limit]
        for number in numbers:
            if number in aborted:
                self._told(number, _NOTHING)
        numbers = [number for number in numbers if number not in aborted]
        if not numbers:
            return
        rows = [asked.prompts[number] for number in numbers]
        images = [asked.images[number] for number in numbers] if asked.images else []
        try:
            found = generated(
                self._engine,
                rows,
                asked.sampling,
                limit,
                asked.stop_token_ids,
                asked.extras,
                images,
            )
        except EngineError as error:
            self._begun = dict(zip(numbers, error.begun, strict=False))
            raise
        for number, completion in zip(numbers, found, strict=True):
            self._told(number, completion)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
