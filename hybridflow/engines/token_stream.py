"""Requests in flight on one server. The server streams responses token by token as server-sent
events.

All requests share one event loop in one thread. If the server accepts several prompts per HTTP
request, a batch is sent in one request, which preserves its order in the scheduler; the server
streams all responses concurrently. Each kind of server has a subclass that defines requests, event
parsing and aborts.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp
import numpy as np
import orjson

from hybridflow.batch import Supports
from hybridflow.engines.base import Completion, Extras, PromptImages, Told, WeightSpan
from hybridflow.errors import EngineError, EngineSilent

FINISH_REASONS = ("stop", "length", "abort")
_ABORT_S = 5.0
# of the patches in one HTTP request, before encoding; a prompt with more is sent alone
_IMAGE_BYTES = 64 << 20
Value = TypeVar("Value")


class Answer:
    """A partial response. The event loop's thread writes it, and any thread may read it."""

    __slots__ = ("_heard", "_log_probs", "_supports", "_tokens", "routes")

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._supports: list[Supports] = []
        # state after the last event, assigned atomically: number of list entries, their weight
        # versions, and the finish reason
        self._heard: tuple[int, tuple[WeightSpan, ...], str] = (0, (), "")
        self.routes: str | None = None

    @property
    def finish_reason(self) -> str:
        """The finish reason; an empty string while the response is being generated."""
        return self._heard[2]

    def add(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        reason: str,
        spans: Sequence[Mapping[str, Any]],
        supports: Supports | None = None,
    ) -> None:
        """Append the tokens of one event.

        Args:
            reason: the finish reason; empty while the response is being generated.
            spans: {version, start, end} dicts that cover all tokens so far; a span without an end
                extends to the last token.
            supports: the tokens' sampling supports, if requested.
        """
        if reason and reason not in FINISH_REASONS:
            raise ValueError(f"unknown finish reason {reason!r}")
        known = (
            (len(log_probs), "log-probs"),
            (len(tokens if supports is None else supports), "supports"),
        )
        if missing := [f"{count} {what}" for count, what in known if count != len(tokens)]:
            if reason != "abort":
                raise ValueError(f"got {missing[0]} for {len(tokens)} tokens")
            # the server repeats a token of an aborted request that was waiting
            tokens = tokens[:0]
            log_probs = log_probs[:0]
        if len(tokens):
            self._tokens.append(tokens)
            self._log_probs.append(log_probs)
            self._supports += [] if supports is None else [supports]
        count = sum(map(len, self._tokens))
        made_by = tuple(
            WeightSpan(str(s["version"]), int(s["start"]), int(s.get("end", count))) for s in spans
        )
        self._heard = (len(self._tokens), made_by, reason)

    def continued(self, version: str) -> list[dict[str, Any]]:
        """Return the spans so far, extended by tokens from weight `version`, as an argument for
        `add`."""
        known = [vars(span) for span in self._heard[1]]
        if known and known[-1]["version"] == version:
            return [*known[:-1], {"version": version, "start": known[-1]["start"]}]
        return [*known, {"version": version, "start": len(self)}]

    def __len__(self) -> int:
        return sum(map(len, self._tokens[: self._heard[0]]))

    def completion(self, prompt_tokens: int, extras: Extras) -> Completion:
        """Return the response so far. If it is unfinished, its finish reason is `abort`."""
        count, spans, reason = self._heard
        ids = np.concatenate([np.empty(0, np.int64), *self._tokens[:count]])
        log_probs = np.concatenate([np.empty(0, np.float32), *self._log_probs[:count]])
        routes = self._routes(prompt_tokens + len(ids) - 1) if extras.routes else None
        supports = Supports.concat(self._supports[:count]) if extras.support else None
        return Completion(ids, log_probs, reason or "abort", spans, routes, supports)

    def _routes(self, rows: int) -> np.ndarray | None:
        """Decode the experts of every token except the last (base64 of int32,
        sglang/srt/state_capturer/routed_experts.py:166)."""
        if self.routes is None:
            if not len(self) or self.finish_reason == "abort":
                return None
            raise ValueError(
                "no routed experts returned; they require EngineSpec.return_routed_experts and a "
                "mixture-of-experts model"
            )
        flat = np.frombuffer(base64.b64decode(self.routes, validate=True), dtype=np.int32)
        if not len(flat) or len(flat) % rows:
            raise ValueError(
                f"got {len(flat)} routed experts for {rows} tokens; expected the same number for "
                "each token"
            )
        return flat.reshape(rows, -1)


class Asked:
    """A batch of prompts in flight. `told(prompt index, completion)` is called in the event loop's
    thread for each finished response. If the requests fail, `done` fails with the error."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: Sequence[dict[str, Any]],
        extras: Extras,
        told: Told,
        images: Sequence[PromptImages] = (),
    ) -> None:
        self.prompts = prompts
        self.images = images  # of each prompt; empty if no prompt has images
        self.parameters = parameters
        self.extras = extras
        self.told = told
        stem = secrets.token_hex(8)
        # of equal length, because SGLang aborts every request whose name starts with the given one
        # (sglang/srt/managers/scheduler.py:5688)
        self.names = [f"{stem}-{number:08}" for number in range(len(prompts))]
        # requests of every HTTP request that the server has started to answer
        self.known: set[str] = set()
        self.early: set[str] = set()  # requests aborted before they were known
        self.answers = [Answer() for _ in prompts]
        self.done: Future[None] = Future()
        # set by `TokenStreams.ask`
        self.streams: TokenStreams | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.task: asyncio.Task[None] | None = None
        self.unwanted = False

    def so_far(self, number: int) -> Completion:
        """Return the response so far, without routed experts. An unfinished response has the finish
        reason `abort`.
        """
        return self.answers[number].completion(0, Extras(support=self.extras.support))

    def abort(self, numbers: Sequence[int]) -> None:
        """Ask the engine to abort these responses. Returns once the request has been sent."""
        assert self.streams is not None
        self.streams.abort(self, [self.names[number] for number in numbers])

    def give_up(self) -> None:
        """Stop waiting for responses. Unfinished ones are aborted in the engine, and `done` fails
        with an EngineError.
        """
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop has stopped, and all requests with it
                self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self.unwanted = True
        if self.task is not None:
            self.task.cancel()


class TokenStreams:
    """Token requests to one engine. Each kind of server has a subclass.

    Args:
        url: base address.
        headers: sent with each request.
        name: the engine's name, used in errors.
        silence_s: with requests in flight, the engine counts as silent after this many seconds
            without any data. A whole response may take longer.
        batch_size: prompts per HTTP request.
    """

    def __init__(
        self, url: str, headers: dict[str, str], name: str, silence_s: float, batch_size: int
    ) -> None:
        self.url = url
        self.headers = headers
        self.name = name
        self.silence_s = silence_s
        self.batch_size = batch_size
        self._heard = 0.0
        self._lock = threading.Lock()
        self._loop = None
        self._session: aiohttp.ClientSession | None = None
        self._thread: threading.Thread | None = None

    _loop: asyncio.AbstractEventLoop | None
    path = "/generate"
    reads_images = False

    # ---- implemented by each kind of server

    def _body(self, asked: Asked, numbers: range) -> dict[str, Any]:
        """Return the request body for these prompts."""
        raise NotImplementedError

    def _read(self, asked: Asked, event: Any, names: Mapping[str, int]) -> str:
        """Append an event to the response that it belongs to, and return the request's name. Raises
        EngineError if the server rejected the request; other exceptions are reported as a malformed
        event.

        Args:
            names: {request name: prompt index} of the prompts in the HTTP request.
        """
        raise NotImplementedError

    async def _call_off(self, names: Sequence[str]) -> None:
        """Ask the server to abort these requests. Implementations send the message with `_tell`."""
        raise NotImplementedError

    # ---- called from other threads

    def ask(self, asked: Asked) -> None:
        """Send the prompts and return immediately; `asked.done` resolves once all responses are
        complete.

        It fails with EngineError (rejected or malformed) or EngineSilent (no connection, or
        silent). Unfinished prompts are then aborted in the engine.
        """
        asked.streams = self
        self._schedule(self._answer(asked))
        asked.loop = self._loop  # None if everything was aborted in the meantime

    def abort(self, asked: Asked, names: Sequence[str]) -> None:
        """Ask the engine to abort these requests, which then finish with the tokens so far. Returns
        once the message has been sent."""
        task = self._schedule(self._abort_known(asked, names))
        with suppress(TimeoutError, CancelledError):
            task.result(2 * _ABORT_S)

    def heard(self) -> None:
        """Reset the silence timer, for example after the engine was blocked."""
        self._heard = time.monotonic()

    def close(self) -> None:
        """Abort all requests and stop the thread."""
        with self._lock:
            loop = self._loop
            thread = self._thread
            self._loop = None
            self._thread = None
        if loop is None or thread is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(_ABORT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_ABORT_S)

    # ---- in the loop's thread

    async def _answer(self, asked: Asked) -> None:
        parts = list(_parts(asked, self.batch_size))
        asked.task = asyncio.current_task()
        tasks = [
            asyncio.ensure_future(self._exchange(asked, part))
            for part in parts
            if not asked.unwanted
        ]
        try:
            if asked.unwanted:
                raise asyncio.CancelledError
            await asyncio.gather(*tasks)
        except BaseException as error:  # includes cancellation: waiting callers must be notified
            for task in tasks:
                task.cancel()
            given_up = EngineError("the requests were aborted", engine=self.name)
            asked.done.set_exception(error if isinstance(error, EngineError) else given_up)
            if not isinstance(error, EngineError | asyncio.CancelledError):
                raise
        else:
            asked.done.set_result(None)

    async def _exchange(self, asked: Asked, numbers: range) -> None:
        """Send one HTTP request and handle its events."""
        names = {asked.names[number]: number for number in numbers}
        body = self._body(asked, numbers)
        open_names = set(names)
        try:
            async for event in self._events(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)):
                if not asked.known >= names.keys():
                    asked.known |= names.keys()
                    await self._abort(sorted(asked.early & names.keys()))
                self._take(asked, event, names, open_names)
            if open_names:
                raise EngineError(
                    f"{self.path} ended before {len(open_names)} prompts were answered",
                    engine=self.name,
                )
        except aiohttp.ClientError as error:
            raise EngineSilent(f"{self.path}: no connection: {error}", engine=self.name) from error
        finally:
            if open_names:
                await self._abort(sorted(open_names))

    def _take(self, asked: Asked, event: Any, names: dict[str, int], open_names: set[str]) -> None:
        if isinstance(event, dict) and "error" in event:
            raise EngineError(f"{self.path} failed: {str(event['error'])[:500]}", engine=self.name)
        try:
            name = self._read(asked, event, names)
            number = names[name]
            answer = asked.answers[names[name]]
            if answer.finish_reason:
                completion = answer.completion(len(asked.prompts[number]), asked.extras)
                open_names.discard(name)
                asked.told(number, completion)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"{self.path} returned a malformed event: {type(error).__name__}: {error}",
                engine=self.name,
            ) from error

    async def _events(self, body: bytes) -> AsyncIterator[Any]:
        """Yield the parsed events of one HTTP response."""
        asked_at = time.monotonic()
        session = self._open_session()
        headers = self.headers | {"Content-Type": "application/json"}
        request = session.post(
            f"{self.url}{self.path}", data=body, headers=headers, allow_redirects=False
        )
        response = await self._heard_within(request, asked_at)
        try:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                raise EngineError(
                    f"{self.path} returned status {response.status}: {text}", engine=self.name
                )
            rest = bytearray()
            ended = False
            while not ended:
                data = await self._heard_within(response.content.readany(), asked_at)
                searched = max(0, len(rest) - 1)
                rest += data
                while (end := rest.find(b"\n\n", searched)) >= 0:
                    event = bytes(rest[:end])
                    searched = 0
                    del rest[: end + 2]
                    if ended := event == b"data: [DONE]":
                        break
                    yield self._parsed(event)
                if not data and not ended:
                    raise EngineSilent(
                        f"{self.path}: connection closed before the response ended",
                        engine=self.name,
                    )
        finally:
            response.close()

    def _parsed(self, event: bytes) -> Any:
        try:
            return orjson.loads(event.removeprefix(b"data: "))
        except ValueError as error:
            raise EngineError(
                f"{self.path} returned invalid JSON: {event[:200]!r}", engine=self.name
            ) from error

    async def _heard_within(self, coming: Awaitable[Value], asked_at: float) -> Value:
        """Wait for data. Raises EngineSilent if no request receives any data for `silence_s`."""
        waiting = asyncio.ensure_future(coming)
        try:
            while True:
                left = max(self._heard, asked_at) + self.silence_s - time.monotonic()
                await asyncio.wait({waiting}, timeout=max(0.0, left))
                if waiting.done():
                    self._heard = time.monotonic()
                    return waiting.result()
                if time.monotonic() >= max(self._heard, asked_at) + self.silence_s:
                    raise EngineSilent(
                        f"no data from {self.path} within {self.silence_s:g} s", engine=self.name
                    )
        finally:
            waiting.cancel()

    async def _abort_known(self, asked: Asked, names: Sequence[str]) -> None:
        # a server ignores unknown names, so the abort is repeated once it knows them
        asked.early |= set(names) - asked.known
        await self._abort(names)

    async def _abort(self, names: Sequence[str]) -> None:
        """Abort requests that are no longer needed; errors are ignored."""
        with suppress(aiohttp.ClientError, TimeoutError):
            await self._call_off(names)

    async def _tell(self, path: str, body: dict[str, Any]) -> None:
        """Send a message and ignore the response."""
        session = self._open_session()
        timeout = aiohttp.ClientTimeout(total=_ABORT_S)
        async with session.post(
            f"{self.url}{path}", json=body, headers=self.headers, timeout=timeout
        ):
            pass

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # proxies from the environment must not see or break calls to this machine, so trust_env
            # stays off
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.silence_s),
                read_bufsize=1 << 20,
            )
        return self._session

    async def _end(self) -> None:
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _schedule(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        # `close` cancels everything scheduled so far, so nothing may be scheduled later
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=f"tokens-{self.name}", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)


def _parts(asked: Asked, most: int) -> Iterator[range]:
    """Divide the prompts into consecutive HTTP requests of at most `most` prompts and, unless a
    prompt alone has more, `_IMAGE_BYTES` of patches.
    """
    start = total = 0
    for end in range(len(asked.prompts)):
        size = added = asked.images[end].pixels.nbytes if asked.images else 0
        if size and end > start and asked.images[end].equals(asked.images[end - 1]):
            added = 0  # samples of a prompt share its images
        is_full = added and total + added > _IMAGE_BYTES
        if end > start and (end - start == most or is_full):
            yield range(start, end)
            start = end
            total = 0
            added = size
        total += added
    if start < len(asked.prompts):
        yield range(start, len(asked.prompts))
