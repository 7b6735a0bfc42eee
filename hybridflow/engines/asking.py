"""Asking an engine for tokens without waiting: each answer is told as it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import NO_EXTRAS, Completion, Engine, Extras
from hybridflow.errors import EngineError

Told = Callable[[int, Completion], None]
_NOTHING = Completion([], [], "abort", ())


@dataclass(frozen=True)
class TokenRequests:
    """Prompts that an engine is asked for together.

    Attributes:
        prompts: token ids of each.
        max_new_tokens: upper bound on the length of each response.
        stop_token_ids: a response ends with, and includes, the first of these.
        extras: what to bring besides tokens and log-probs.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingConfig
    max_new_tokens: Sequence[int]
    stop_token_ids: Sequence[int]
    extras: Extras = NO_EXTRAS


class Asking(Protocol):
    """Requests under way."""

    # ends after the last answer was told; has the error where some were not answered
    done: Future[None]

    def so_far(self, number: int) -> Completion:
        """What has come of a response by now, without its experts; `abort` where it has not ended.
        Called at any time, in any thread."""

    def abort(self, numbers: Sequence[int]) -> None:
        """Have the engine end these responses. They are told as any other, `abort` with what has
        come of them, unless they end by themselves first."""

    def give_up(self) -> None:
        """End what is under way; `done` has an EngineError soon after, unless everything was
        answered."""


@runtime_checkable
class Streams(Protocol):
    """What an engine has that answers many requests at once, each as it ends."""

    def ask(self, requests: TokenRequests, told: Told) -> Asking:
        """Send the requests and return. `told` is called, in another thread, with the number of
        each prompt and its response."""


def ask(engine: Engine, requests: TokenRequests, told: Told) -> Asking:
    """Ask the engine, in a thread of its own if it can only `generate`."""
    return (
        engine.ask(requests, told)
        if isinstance(engine, Streams)
        else _InThread(engine, requests, told)
    )


def generated(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    most: int,
    stop_token_ids: Sequence[int],
    extras: Extras,
) -> list[Completion]:
    """The answers of `Engine.generate`, whose keywords are given where they are asked for.

    Raises:
        EngineError: an answer does not say what its tokens were sampled among, and that was asked
            for.
    """
    wanted = {f"with_{name}": True for name, value in extras._asdict().items() if value}
    found = engine.generate(prompts, sampling, most, stop_token_ids, **wanted)
    if extras.support and any(one.support is None for one in found):
        raise EngineError(
            "does not say what its tokens were sampled among", engine=engine.spec.name
        )
    return found


class _InThread:
    """Calls of `generate`, one for each bound on the length, in one thread."""

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
        """A call of `generate` that has begun goes on to its end; those of later calls are not
        asked for."""
        self._aborted |= set(numbers)

    def give_up(self) -> None:
        self._end(EngineError("the requests were given up", engine=self._engine.spec.name))

    def _run(self) -> None:
        try:
            for limit in sorted(set(self._requests.max_new_tokens)):
                self._generate(limit)
        except Exception as error:  # whatever it is, the one who asked is waiting for it
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
        try:
            found = generated(
                self._engine, rows, asked.sampling, limit, asked.stop_token_ids, asked.extras
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
