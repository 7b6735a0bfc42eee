"""Requests for tokens. Each is scheduled separately, and is either waiting, in flight on an engine,
or finished.

A request waits until an engine has room, and is sent to the engine with the fewest pending tokens.
Other samples of the same prompt are sent with it, so that their prefix is computed only once. A
request lost with its engine resumes from its last token on another engine. Requests make progress
in rounds (`advance`), while a caller awaits an answer.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig, SamplingConfig
from hybridflow.config.val_sets import VAL_SET, val_sets
from hybridflow.data.balancing import shares
from hybridflow.data.image_tokens import IMAGES
from hybridflow.engines.base import Extras
from hybridflow.errors import EnginesLostError, HybridFlowError, WorkerError
from hybridflow.observe import spans
from hybridflow.rollout.continuation import continued, joined
from hybridflow.rollout.protocols import ROOM, SyncReport
from hybridflow.single_controller import in_thread
from hybridflow.workers.requests import CUT_SHORT

# maximum time for which an engine may have a free slot before it gets the next request; longer for
# many engines, because a poll takes the driver almost a millisecond for each of them
_POLL_S = 0.25
_POLL_S_OF_AN_ENGINE = 0.02
# number of requests sent to an engine, as a multiple of the number that it runs concurrently
_RUNNING_SETS = 2
# column [B] of requests with their own sampling settings
_SAMPLING = "sampling"


@dataclass(eq=False)
class Request:
    """A prompt and its answer.

    Attributes:
        number: identifies the request to the engine's worker.
        order: within a round, requests are scheduled in this order, and requests of the same
            `group` are scheduled together.
        most: number of tokens that may still be sampled.
        prompts, row: the batch (possibly in the object store) that contains the prompt, and the
            prompt's row.
        tokens: the prompt's tokens, if they are in this process instead.
        images: a one-row batch with the images (`IMAGES`) of `tokens`, if the run has images.
        begun: tokens already sampled by engines that were lost; resent as part of the prompt.
        answer: the batch that contains the answer, and its row; None until the answer is complete.
        is_over: future that is resolved when the answer is complete, if a task in this process
            awaits it.
        sampling: sampling settings of this request; None uses the run's settings.
    """

    number: int
    order: int
    group: Hashable
    training: bool
    val_set: str
    most: int
    prompts: DataProto | None = None
    row: int = 0
    tokens: np.ndarray | None = None
    images: DataProto | None = None
    begun: DataProto | None = None
    engine: int = -1
    answer: tuple[DataProto, int] | None = None
    is_over: asyncio.Future[None] | None = None
    sampling: SamplingConfig | None = None

    def done(self) -> bool:
        """Return True if the answer is complete."""
        return self.answer is not None

    def prompt(self) -> DataProto:
        """Return the prompt as a one-row batch."""
        if self.prompts is None:
            return _tokens_of([self])
        return one_row(self.prompts, self.row)


class Requests(ABC):
    """`Engines` whose samples are single requests; the base class of all engine services.

    Attributes:
        recover: awaited with the error when no engine is left or workers are lost; raises if it
            cannot recover.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._val_sampling = {name: one.sampling for name, one in val_sets(config).items()}
        self.recover: Callable[[HybridFlowError], Awaitable[None]] = _give_up
        self.asked = asyncio.Event()  # set when a task of this process adds a request
        self._next_number = 0
        self._new: list[Request] = []
        self._waiting: deque[list[Request]] = deque()  # requests of one list are scheduled together
        self._under_way: dict[int, Request] = {}
        self._unwanted: list[Request] = []  # in flight, but no longer needed
        self._round: asyncio.Task[None] | None = None
        self._counted = set[int]()  # engines whose requests are counted for the timeline

    # ---- new requests

    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> list[Request]:
        """Create a request for each row (`Rollouts.begin`)."""
        rows = available(prompts, "prompt_ids", *IMAGES)
        uids = prompts["uid"].tolist() if "uid" in prompts else range(len(prompts))
        most = values(prompts, ROOM, self.config.data.max_response_length)
        val_sets = values(prompts, VAL_SET, "")
        known: dict[int, int] = {}  # by row of the prompts: its row in `begun`
        if begun is not None:
            known.update(zip(begun["row"].tolist(), range(len(begun)), strict=True))
        first = self._next_number
        requests = []
        for row, uid in enumerate(uids):
            one = self._request(training, val_sets[row], most[row], (first, uid))
            one.prompts = rows
            one.row = row
            requests.append(one)
            if begun is None or row not in known:
                self._new.append(one)
                continue
            answer = one_row(begun, known[row]).drop(["row"])
            if answer["finish_reason"][0] != CUT_SHORT:
                self._end(one, answer)
            elif self._goes_on(one, answer, answer):
                self._new.append(one)
        return requests

    def ask(
        self,
        tokens: Sequence[int],
        most: int,
        *,
        training: bool,
        val_set: str = "",
        order: int = 0,
        group: Hashable = None,
        begun: DataProto | None = None,
        sampling: SamplingConfig | None = None,
        images: DataProto | None = None,
    ) -> Request:
        """Request a continuation of `tokens`, of up to `most` tokens, for a task that will await
        `answer`.

        Args:
            order, group, sampling, images: see `Request`.
            begun: an interrupted answer to continue.
        """
        one = self._request(training, val_set, most, group)
        # converted here, because a round that converts thousands would block all other tasks
        one.tokens = np.asarray(tokens, np.int64)
        one.order = order
        one.sampling = sampling
        one.images = images
        if begun is None or self._goes_on(one, begun, begun):
            one.is_over = asyncio.get_running_loop().create_future()
            self._new.append(one)
            self.asked.set()
        return one

    async def answer(self, request: Request) -> tuple[DataProto, int]:
        """Wait for the answer, and return (batch, row). Another task must be awaiting `advance`.
        Cancelling this call aborts the request."""
        try:
            if request.is_over is not None:
                await request.is_over
        except asyncio.CancelledError:
            self._unwanted.append(request)
            raise
        assert request.answer is not None
        return request.answer

    def _request(self, training: bool, val_set: str, most: int, group: Hashable) -> Request:
        number = self._next_number
        self._next_number += 1
        return Request(number, number, group, training, val_set, most)

    @property
    def is_idle(self) -> bool:
        """True if no request is waiting or in flight."""
        return not (self._new or self._waiting or self._under_way)

    @property
    def is_working(self) -> bool:
        """True if a request is in flight."""
        return bool(self._under_way)

    @property
    def num_new(self) -> int:
        """Number of requests added since the last round."""
        return len(self._new)

    # ---- rounds

    async def advance(self) -> None:
        """Send as many requests as the engines can accept, and wait briefly for answers. Concurrent
        callers share one round.

        Raises:
            EnginesLostError: no engine is left. The requests wait until an engine has received
                weights.
            EngineError: a running engine rejected a request.
        """
        if self._round is None or self._round.done():
            self._round = asyncio.ensure_future(self._advance())
            # at least one caller has seen the error
            self._round.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.shield(self._round)

    async def answers(self, samples: Sequence[Request]) -> DataProto:
        """Wait until all samples have finished, and return their answers as a batch."""
        while not all(map(Request.done, samples)):
            await self.advance()
        return self.batch(samples)

    async def _advance(self) -> None:
        try:
            await self.drop_unwanted()
            await self._send()
            self._count_in_flight()
            cut = 0
            for training in (True, False):
                engines = set[int]()
                for one in self._under_way.values():
                    if one.training == training:
                        engines.add(one.engine)
                if not engines:
                    continue
                wait_s = max(_POLL_S, _POLL_S_OF_AN_ENGINE * len(engines))
                for answers in await self._collect(training, sorted(engines), wait_s):
                    cut += await self._receive(answers)
            self._count_in_flight()
            if cut:
                await self._leave_out_lost(cut)
        except (EnginesLostError, WorkerError) as error:
            await self.recover(error)

    # ---- answers

    def batch(self, samples: Sequence[Request]) -> DataProto:
        """Return the answers of finished samples (`Rollouts.answers`)."""
        return self._answers(samples)

    def shown(self, samples: Sequence[Request]) -> DataProto:
        """Return only the response tokens of the answers (`Rollouts.shown`)."""
        return self._answers(samples, ["response_ids"])

    async def begun(self, samples: Sequence[Request]) -> DataProto | None:
        """Return the partial answers (`Rollouts.begun`) with the columns of `batch`. Answers in
        progress have the finish reason `CUT_SHORT`."""
        ended = []  # places in `samples`
        left = {}  # by number: the place
        engines = set[int]()
        for place, one in enumerate(samples):
            if one.done():
                ended.append(place)
                continue
            left[one.number] = place
            if one.training and one.number in self._under_way:
                engines.add(one.engine)
        parts = []
        places = list(ended)  # of all rows of `parts`
        if ended:
            parts.append(self.batch([samples[place] for place in ended]).fetch())
        for answers in await self._so_far(sorted(engines)) if engines else ():
            found = answers.fetch()
            for row, number in enumerate(found["ticket"].tolist()):
                if number in left:
                    place = left.pop(number)
                    rest = one_row(found, row).drop(["ticket"])
                    parts.append(_whole(samples[place], rest))
                    places.append(place)
        for place in left.values():
            begun = samples[place].begun
            if begun is not None:
                parts.append(begun)
                places.append(place)
        if not parts:
            return None
        return DataProto.concat(parts).with_columns(sample=np.array(places, np.int64))

    def _answers(self, samples: Sequence[Request], names: Sequence[str] | None = None) -> DataProto:
        rows: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        batches: dict[int, DataProto] = {}
        for place, one in enumerate(samples):
            assert one.answer is not None
            batch, row = one.answer
            batches[id(batch)] = batch
            rows.setdefault(id(batch), []).append(row)
            places.setdefault(id(batch), []).append(place)
        parts = []
        for key, batch in batches.items():
            shown = batch if names is None else batch.select(names)
            parts.append(shown.rows(np.array(rows[key])))
        order = np.argsort(np.concatenate(list(places.values())))
        return concat(parts).reorder(order)

    # ---- aborts

    async def abort(self, samples: Sequence[Request]) -> None:
        """Abort these requests, whatever their state (`Rollouts.abort`)."""
        numbers = {one.number for one in samples}

        def stays(one: Request) -> bool:
            return one.number not in numbers

        self._new = list(filter(stays, self._new))
        kept = [list(filter(stays, group)) for group in self._waiting]
        self._waiting = deque(filter(None, kept))
        at_engines: dict[int, list[int]] = {}
        for number in sorted(numbers & self._under_way.keys()):
            one = self._under_way.pop(number)
            at_engines.setdefault(one.engine, []).append(number)
        if at_engines:
            await self._abort(dict(sorted(at_engines.items())))

    async def drop_unwanted(self) -> None:
        """Abort the requests whose tasks have been cancelled."""
        if self._unwanted:
            unwanted = self._unwanted
            self._unwanted = []
            await self.abort(unwanted)

    async def forget(self) -> None:
        """Abort all requests (`Rollouts.forget`)."""
        engines = sorted({one.engine for one in self._under_way.values()})
        self._new = []
        self._unwanted = []
        self._under_way = {}
        self._waiting.clear()
        if engines:
            await self._forget(engines)

    # ---- internals

    async def _send(self) -> None:
        self._take_in()
        if not self._waiting:
            return
        # grouped by sampling parameters
        alike: dict[tuple[bool, str, str], dict[int, list[Request]]] = {}
        for one in self._assigned():
            own = "" if one.sampling is None else repr(one.sampling)
            own += " with images" * _has_images(one)
            parts = alike.setdefault((not one.training, one.val_set, own), {})
            parts.setdefault(one.engine, []).append(one)
        for (validating, _, _), parts in sorted(alike.items()):
            # scheduling thousands of requests takes time: let other tasks run in between
            await asyncio.sleep(0)
            asked = {}
            for engine, part in sorted(parts.items()):
                # skip those aborted in the meantime
                left = [one for one in part if one.number in self._under_way]
                if left:
                    asked[engine] = _rows(left)
            if asked:
                await self._ask(not validating, asked)

    def _assigned(self) -> list[Request]:
        """Assign as many waiting requests to engines as these have room for, and return them."""
        owed = dict.fromkeys(self._serving(), 0)
        for one in self._under_way.values():
            if one.engine in owed:
                owed[one.engine] += one.most
        # A single engine receives everything: no other engine could become free earlier, and
        # nothing is sent while the policy trains.
        sets = _RUNNING_SETS * (1 + self.config.trainer.max_staleness)
        slots = self.config.rollout.max_running_requests * len(owed)
        room = sets * slots - len(self._under_way)
        groups: list[list[Request]] = []
        tokens = []
        while self._waiting and (room > 0 or len(owed) == 1):
            group = self._waiting.popleft()
            groups.append(group)
            tokens.append(sum(one.most for one in group))
            room -= len(group)
        assigned = []
        for group, engine in zip(groups, shares(tokens, owed), strict=True):
            for one in group:
                one.engine = engine
                self._under_way[one.number] = one
            assigned += group
        return assigned

    def _take_in(self) -> None:
        """Queue new requests, sorted by `order` regardless of when environments responded."""
        together: dict[Hashable, list[Request]] = {}
        for one in sorted(self._new, key=lambda one: one.order):
            group = one.number if one.group is None else one.group
            together.setdefault((one.training, one.val_set, group), []).append(one)
        self._new = []
        self._waiting.extend(together.values())

    async def _receive(self, answers: DataProto) -> int:
        """Process a batch of answers, identified by their tickets, and requeue interrupted
        requests. Returns the number of interrupted requests.
        """
        if not len(answers):
            return 0
        numbers = answers["ticket"].tolist()
        reasons = answers["finish_reason"].tolist()
        answers = answers.drop(["ticket"])
        if answers.deferred and self._is_awaited(numbers):
            answers = await in_thread(answers.fetch)
        cut = 0
        for row, (number, reason) in enumerate(zip(numbers, reasons, strict=True)):
            one = self._under_way.pop(number, None)
            if one is None:
                continue  # aborted
            if one.begun is None and reason != CUT_SHORT:
                self._end(one, answers, row)
                continue
            rest = one_row(answers, row).fetch()
            whole = _whole(one, rest)
            if reason != CUT_SHORT:
                self._end(one, whole)
                continue
            cut += 1
            if self._goes_on(one, whole, rest):
                self._waiting.appendleft([one])
        return cut

    def _is_awaited(self, numbers: Sequence[int]) -> bool:
        """Return True if a task in this process awaits one of these requests."""
        for number in numbers:
            one = self._under_way.get(number)
            if one is not None and one.is_over is not None:
                return True
        return False

    def _end(self, one: Request, batch: DataProto, row: int = 0) -> None:
        one.answer = batch, row
        if one.is_over is not None and not one.is_over.done():
            one.is_over.set_result(None)

    def _goes_on(self, one: Request, begun: DataProto, added: DataProto) -> bool:
        """Prepare a request to continue after its last token. Returns False if its answer is
        already complete.
        """
        one.most -= int(added.lengths("response_ids")[0])
        # the engine was lost after the last token, but before it reported completion
        if one.most < 1:
            self._end(one, _ended_as("length", begun))
            return False
        one.prompts = continued(one.prompt().fetch(), added)
        one.row = 0
        one.begun = begun
        return True

    def _count_in_flight(self) -> None:
        held = Counter(one.engine for one in self._under_way.values())
        for engine in sorted(self._counted | held.keys()):
            spans.count(f"requests of engine-{engine}", held[engine])
        self._counted |= held.keys()

    def _sampling(self, training: bool, asked: DataProto) -> SamplingConfig:
        """Return the sampling settings shared by rows that are sent to an engine together."""
        if _SAMPLING in asked:
            own: SamplingConfig = asked[_SAMPLING][0]
            return own
        if training:
            return self.config.rollout.sampling
        val_set = asked[VAL_SET][0] if VAL_SET in asked else ""
        return self._val_sampling[val_set]

    def _ask_again(self) -> None:
        """Requeue all requests in flight after their workers have been lost."""
        lost = list(self._under_way.values())
        self._under_way = {}
        self._waiting.extendleft([one] for one in reversed(lost))

    async def close(self) -> None:
        """Cancel the round in progress, if any."""
        if self._round is not None:
            self._round.cancel()

    async def load_metrics(self) -> dict[str, float]:
        """Return the engines' load (`Rollouts.load_metrics`); by default, no metrics."""
        return {}

    @abstractmethod
    async def sync(self, version: int) -> SyncReport:
        """Transfer weights (`WeightSync.sync`)."""

    @abstractmethod
    async def sleep(self) -> None:
        """Release memory (`Rollouts.sleep`)."""

    @abstractmethod
    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate memory (`Rollouts.wake`)."""

    @abstractmethod
    def _serving(self) -> Sequence[int]:
        """Return the engines that accept requests. Raises EnginesLostError if there is none."""

    @abstractmethod
    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        """Send each engine its rows, with the columns ticket, prompt_ids and max_new_tokens; also
        `IMAGES` if the prompts have images, and `VAL_SET` for a named validation set.
        """

    @abstractmethod
    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        """Wait up to `wait_s`, and return the finished requests of these engines as batches with
        tickets."""

    @abstractmethod
    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        """Return the partial answers of all training requests of these engines
        (`RolloutWorker.so_far`)."""

    @abstractmethod
    async def _leave_out_lost(self, answers: int) -> None:
        """Exclude lost engines. `answers` is the number of answers that were interrupted. Raises
        EnginesLostError if no engine is left.
        """

    @abstractmethod
    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        """Make each engine abort the requests with these tickets."""

    @abstractmethod
    async def _forget(self, engines: Sequence[int]) -> None:
        """Make these engines abort all of their requests."""


async def _give_up(error: HybridFlowError) -> None:
    raise error


def extras_for(config: RunConfig, training: bool) -> Extras:
    """Return the kinds of data that engines must return in addition to tokens and log-probs.
    Validation needs no such data.
    """
    if not training:
        return Extras()
    return Extras(derived.needs_engine_routes(config), derived.needs_support(config))


def concat(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate batches. Columns that are deferred in only some of the batches are fetched
    first."""
    deferred = {part.deferred for part in parts}
    if len(deferred) > 1:
        parts = [part.fetch() for part in parts]
    return DataProto.concat(parts)


def one_row(batch: DataProto, row: int) -> DataProto:
    """Select a single row, as a batch."""
    return batch.rows(np.array([row]))


def _whole(one: Request, rest: DataProto) -> DataProto:
    """Return a request's answer, of which engines that were lost sampled the beginning."""
    return rest if one.begun is None else joined(one.begun, rest)


def available(batch: DataProto, *names: str) -> DataProto:
    """Select these columns, except those that the batch does not have."""
    return batch.select([name for name in names if name in batch])


def values(batch: DataProto, name: str, default: Any) -> list[Any]:
    """Return a column's values, or `default` for each row if the batch does not have the column."""
    found: list[Any] = batch[name].tolist() if name in batch else [default] * len(batch)
    return found


def _ended_as(reason: str, answer: DataProto) -> DataProto:
    return answer.with_columns(finish_reason=np.array([reason], dtype=object))


def _has_images(one: Request) -> bool:
    """Return True if the request's prompt has image columns."""
    return one.images is not None or (one.prompts is not None and IMAGES[0] in one.prompts)


def _tokens_of(requests: Sequence[Request]) -> DataProto:
    """Return the prompts of requests made by tasks in this process. Either all or none of them have
    images.
    """
    ids = Jagged.from_rows([one.tokens for one in requests if one.tokens is not None], np.int64)
    prompts = DataProto.from_columns({"prompt_ids": ids})
    images = [one.images for one in requests if one.images is not None]
    return prompts.union(DataProto.concat(images)) if images else prompts


def _rows(requests: Sequence[Request]) -> DataProto:
    """Return the prompts of these requests, in order. All have the same sampling settings."""
    parts = []
    for _, together in itertools.groupby(requests, key=lambda one: id(one.prompts)):
        same = list(together)
        prompts = same[0].prompts
        if prompts is None:
            parts.append(_tokens_of(same))
        else:
            rows = np.array([one.row for one in same])
            parts.append(prompts.rows(rows))
    numbers = [one.number for one in requests]
    most = [one.most for one in requests]
    batch = concat(parts).with_columns(
        ticket=np.array(numbers, np.int64), max_new_tokens=np.array(most, np.int64)
    )
    first = requests[0]
    if first.val_set:
        batch = batch.with_columns(**{VAL_SET: objects([first.val_set] * len(requests))})
    if first.sampling is not None:
        batch = batch.with_columns(**{_SAMPLING: objects([first.sampling] * len(requests))})
    return batch
