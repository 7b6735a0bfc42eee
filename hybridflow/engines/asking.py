"""Asynchronous generation requests: each response is reported as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import NO_EXTRAS, Completion, Engine, Extras, PromptImages
from hybridflow.errors import EngineError

Told = Callable[[int, Completion], None]
_NOTHING = Completion([], [], "abort", ())


@dataclass(frozen=True)
class TokenRequests:
    """A batch of prompts for one engine.

    Attributes:
        prompts: token ids of each prompt.
        max_new_tokens: maximum length of each response.
        stop_token_ids: tokens that end a response; the response includes this token.
        extras: optional outputs in addition to tokens and log-probs.
        images: the images of each prompt; empty if no prompt has images.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingConfig
    max_new_tokens: Sequence[int]
    stop_token_ids: Sequence[int]
    extras: Extras = NO_EXTRAS
    images: Sequence[PromptImages] = ()


class Asking(Protocol):
    """Interface of a batch of requests in flight."""

    # resolves after the last response was reported; fails if some requests were not answered
    done: Future[None]

    def so_far(self, number: int) -> Completion:
        """Return the response so far, without routed experts. An unfinished response has the finish
        reason `abort`. Thread-safe.
        """

    def abort(self, numbers: Sequence[int]) -> None:
        """Ask the engine to abort these requests. Each is still reported: with the tokens so far
        and the finish reason `abort`, or normally if it finishes first."""

    def give_up(self) -> None:
        """Abort all requests in flight. `done` then fails with an EngineError, unless all requests
        have already finished.
        """


@runtime_checkable
class Streams(Protocol):
    """Interface for engines that run many requests concurrently and report each response when it is
    complete.
    """

    def ask(self, requests: TokenRequests, told: Told) -> Asking:
        """Send the requests and return immediately. `told(prompt index, response)` is called from
        another thread each time a response is complete.
        """


def ask(engine: Engine, requests: TokenRequests, told: Told) -> Asking:
    """Send requests to the engine, using a separate thread if the engine only supports
    `generate`.
    """
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
