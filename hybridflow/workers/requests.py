"""The requests of one engine's worker: which are under way, and what has come of those that are not."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from hybridflow.engines.asking import Asking, TokenRequests, ask
from hybridflow.engines.base import Completion, Engine, Extras

CUT_SHORT = "cut short"  # finish reason of an answer that the engine, which is lost, has not ended


@dataclass(frozen=True)
class Ended:
    """A request that the engine has ended, or that was cut short."""

    ticket: int
    prompt_tokens: int
    extras: Extras
    completion: Completion


@dataclass(eq=False)
class _Part:
    """Requests that were sent together. `aborted` ones were ended by the engine: whether that was its end is known when
    all of the part have ended."""

    tickets: Sequence[int]
    requests: TokenRequests
    open: set[int]
    start: int = -1
    given_up: bool = False
    aborted: dict[int, Completion] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)  # `EngineRequests.abort` has been called for these
    asking: Asking | None = None


class EngineRequests:
    """Safe to use from the worker's thread and the engine's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: list[_Part] = []
        self._ended: list[Ended] = []

    def ask(self, engine: Engine, start: int, tickets: Sequence[int], requests: TokenRequests) -> None:
        """Send the requests to the engine, which was started so many times before. EngineError: it takes none like
        these."""
        part = _Part(tickets, requests, set(range(len(tickets))), start)
        with self._changed:
            self._parts.append(part)
        try:
            part.asking = ask(engine, requests, lambda number, completion: self._told(part, number, completion))
        except BaseException:
            self._forget(part)
            raise
        part.asking.done.add_done_callback(lambda _: self._wake())

    def refuse(self, tickets: Sequence[int], requests: TokenRequests) -> None:
        """Cut requests short that no engine was asked."""
        part = _Part(tickets, requests, set(range(len(tickets))))
        with self._changed:
            for number in range(len(tickets)):
                self._end(part, number, Completion([], [], CUT_SHORT, ()))

    def wait(self, seconds: float) -> None:
        """Return when nothing is under way, when requests have failed, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._parts or any(map(_is_done, self._parts)), seconds)

    def failed(self) -> tuple[BaseException, int] | None:
        """An error because of which requests will not be answered, and the start of their engine; None where there is
        none."""
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
        """End all failed requests to this start of the engine with what had come of them."""
        with self._changed:
            for part in [part for part in self._parts if _is_done(part) and part.start == start]:
                self._cut_short(part)

    def abort(self, tickets: Collection[int]) -> None:
        """Have the engine end these requests, and return when it has been told. They end with what has come of them,
        `abort` unless they end by themselves first."""
        wanted: list[tuple[Asking, list[int]]] = []
        with self._changed:
            for part in self._parts:
                numbers = [number for number in sorted(part.open) if part.tickets[number] in tickets]
                part.unwanted |= set(numbers)
                for number in [number for number in numbers if number in part.aborted]:
                    self._end(part, number, part.aborted.pop(number))
                if part.asking is not None and part.open & part.unwanted:
                    wanted.append((part.asking, [number for number in numbers if number in part.open]))
        for asking, numbers in wanted:  # without the lock, which `_told` takes
            asking.abort(numbers)

    def give_up(self) -> None:
        """Have the engine end everything under way; what has not ended is cut short."""
        with self._changed:
            parts = list(self._parts)
        for part in parts:
            part.given_up = True
            if part.asking is not None:
                part.asking.give_up()

    def forget(self) -> None:
        """Give everything up, and what has ended too: nobody asks for it any longer."""
        self.give_up()
        with self._changed:
            self._parts, self._ended = [], []

    def take(self, extras: Extras) -> list[Ended]:
        """What has ended since the last call, of the requests for these extras."""
        with self._changed:
            taken = [one for one in self._ended if one.extras == extras]
            self._ended = [one for one in self._ended if one.extras != extras]
        return taken

    def so_far(self, extras: Extras) -> list[Ended]:
        """What has come of the requests for these extras that have not been taken; `CUT_SHORT` while one goes
        on. They go on."""
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
                        continue  # it ends at this moment, and its experts are not known yet
                    found.append(Ended(part.tickets[number], len(part.requests.prompts[number]), extras, answer))
        return [one for one in found if len(one.completion.token_ids) or one.completion.finish_reason != CUT_SHORT]

    # ---- with the lock, or in the engine's thread

    def _told(self, part: _Part, number: int, completion: Completion) -> None:
        with self._changed:
            if part not in self._parts:
                return  # forgotten
            if completion.finish_reason == "abort" and number not in part.unwanted:
                part.aborted[number] = completion
            else:
                self._end(part, number, completion)

    def _end(self, part: _Part, number: int, completion: Completion) -> None:
        part.open.discard(number)
        asked = part.requests
        self._ended.append(Ended(part.tickets[number], len(asked.prompts[number]), asked.extras, completion))

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

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _is_done(part: _Part) -> bool:
    return part.asking is not None and part.asking.done.done()
