"""Requests for tokens on their way: waiting, under way at an engine, ended. Each is placed on its own.

A request waits until an engine has room, goes to the engine that owes the fewest tokens, and with it the other samples
of its prompt, whose prefix the engine then computes once. One that an engine has begun and lost is asked again from its
last token on, of another engine. Nothing here runs by itself: `poll` moves everything on, in the caller's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.rollout.continuation import continued, joined
from hybridflow.rollout.placing import shares
from hybridflow.workers.requests import CUT_SHORT

_POLL_S = 0.25  # the longest time in which an engine that has ended a request waits for the next
_RUNNING_SETS = 2  # an engine has the requests that it runs, and as many that wait there for a place


@dataclass(eq=False)
class _Request:
    """Row `row` of `prompts`, for up to `most` tokens; `begun` has the tokens that lost engines made of it, which are
    part of the prompt then."""

    ticket: int
    training: bool
    prompts: DataProto
    row: int
    most: int
    begun: DataProto | None = None
    engine: int = -1


class Requests(ABC):
    """The part of a `RolloutService` that is the same over any engines."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._next_ticket = 0
        self._waiting: deque[list[_Request]] = deque()  # those in one list are placed together
        self._under_way: dict[int, _Request] = {}
        self._ended: dict[int, tuple[DataProto, int]] = {}  # the answer is a row of a batch

    def submit(self, prompts: DataProto, *, training: bool) -> list[int]:
        """Take requests in, and return a ticket for each row. Rows of one `uid` are the samples of one prompt."""
        rows, together = prompts.select(["prompt_ids"]), dict[int, list[_Request]]()
        keys = prompts["uid"].tolist() if "uid" in prompts else range(len(prompts))
        tickets = list(range(self._next_ticket, self._next_ticket + len(prompts)))
        self._next_ticket += len(prompts)
        most = self.config.data.max_response_length
        for row, (ticket, key) in enumerate(zip(tickets, keys, strict=True)):
            together.setdefault(key, []).append(_Request(ticket, training, rows, row, most))
        self._waiting.extend(together.values())
        return tickets

    def ended(self, tickets: Iterable[int]) -> bool:
        """Whether all of these requests have ended."""
        return all(ticket in self._ended for ticket in tickets)

    def poll(self) -> None:
        """Send what engines have room for, and wait a moment for answers.

        Raises:
            EnginesLostError: no engine is left. The requests wait until one has taken weights again.
            EngineError: an engine refused a request, and still runs.
        """
        self._send()
        cut = 0
        for training in (True, False):
            engines = sorted({one.engine for one in self._under_way.values() if one.training == training})
            for answers in self._collect(training, engines, _POLL_S) if engines else ():
                cut += self._receive(answers)
        if cut:
            self._leave_out_lost(cut)

    def take(self, tickets: Sequence[int]) -> DataProto:
        """The answers of requests that have ended, in the order of the tickets. They can be taken once."""
        rows: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        batches: dict[int, DataProto] = {}
        for place, ticket in enumerate(tickets):
            batch, row = self._ended.pop(ticket)
            batches[id(batch)] = batch
            rows.setdefault(id(batch), []).append(row)
            places.setdefault(id(batch), []).append(place)
        found = concat([batch.rows(np.array(rows[key])) for key, batch in batches.items()])
        return found.reorder(np.argsort(np.concatenate([places[key] for key in batches])))

    def forget(self) -> None:
        """Give up all requests, waiting, under way or ended; their tickets mean nothing any longer."""
        engines = sorted({one.engine for one in self._under_way.values()})
        self._waiting.clear()
        self._under_way, self._ended = {}, {}
        if engines:
            self._forget(engines)

    # ---- inside

    def _send(self) -> None:
        if not self._waiting:
            return
        owed = dict.fromkeys(self._serving(), 0)
        for one in self._under_way.values():
            if one.engine in owed:
                owed[one.engine] += one.most
        # an engine alone gets everything: there is no other that might be free earlier
        sets = _RUNNING_SETS * (1 + self.config.trainer.max_staleness)  # nobody sends more while the policy trains
        room = sets * self.config.rollout.max_running_requests * len(owed) - len(self._under_way)
        groups: list[list[_Request]] = []
        while self._waiting and (room > 0 or len(owed) == 1):
            groups.append(self._waiting.popleft())
            room -= len(groups[-1])
        for group, engine in zip(groups, shares([sum(one.most for one in g) for g in groups], owed), strict=True):
            for one in group:
                one.engine = engine
                self._under_way[one.ticket] = one
        for training in (True, False):
            parts: dict[int, list[_Request]] = {}
            for one in (one for group in groups for one in group if one.training == training):
                parts.setdefault(one.engine, []).append(one)
            if parts:
                self._ask(training, {engine: _rows(part) for engine, part in sorted(parts.items())})

    def _receive(self, answers: DataProto) -> int:
        """Take in a batch of answers with their tickets. Returns how many were cut short; those wait again."""
        if not len(answers):
            return 0
        tickets, reasons = answers["ticket"].tolist(), answers["finish_reason"].tolist()
        answers, cut = answers.drop(["ticket"]), 0
        for row, (ticket, reason) in enumerate(zip(tickets, reasons, strict=True)):
            one = self._under_way.pop(ticket, None)
            if one is None:
                continue  # it was given up
            if one.begun is None and reason != CUT_SHORT:
                self._ended[ticket] = (answers, row)
                continue
            rest = answers.rows(np.array([row])).fetch()
            whole = rest if one.begun is None else joined(one.begun, rest)
            if reason == CUT_SHORT:
                cut += 1
                self._go_on(one, whole, rest)
            else:
                self._ended[ticket] = (whole, 0)
        return cut

    def _go_on(self, one: _Request, begun: DataProto, added: DataProto) -> None:
        """Let a request wait again, for an engine that goes on from its last token."""
        one.most -= int(added.lengths("response_ids")[0])
        if one.most < 1:  # its engine was lost between the last token and the word that it is the last
            self._ended[one.ticket] = (begun.with_columns(finish_reason=np.array(["length"], dtype=object)), 0)
            return
        one.prompts, one.row = continued(one.prompts.rows(np.array([one.row])).fetch(), added), 0
        one.begun = begun
        self._waiting.appendleft([one])

    def _ask_again(self) -> None:
        """Let all requests under way wait again: the workers that had them are gone."""
        self._waiting.extendleft([one] for one in reversed(self._under_way.values()))
        self._under_way = {}

    @abstractmethod
    def _serving(self) -> Sequence[int]:
        """The engines that may be asked, one at least; EnginesLostError where there is none."""

    @abstractmethod
    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        """Bring each engine its rows: ticket, prompt_ids, max_new_tokens."""

    @abstractmethod
    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        """What of these engines has ended, after waiting up to `wait_s` for all: batches with the tickets."""

    @abstractmethod
    def _leave_out_lost(self, answers: int) -> None:
        """Ask no engine again that has cut so many answers short; EnginesLostError where none is left."""

    @abstractmethod
    def _forget(self, engines: Sequence[int]) -> None:
        """Have these engines give up what they were asked."""


def concat(parts: Sequence[DataProto]) -> DataProto:
    """The rows of all parts. Columns in the store and columns here do not make one column: where both come together,
    all are fetched."""
    return DataProto.concat([part.fetch() for part in parts] if len({part.deferred for part in parts}) > 1 else parts)


def _rows(requests: Sequence[_Request]) -> DataProto:
    """What an engine is asked, in this order."""
    parts: list[DataProto] = []
    start = 0
    for end in range(1, len(requests) + 1):
        if end == len(requests) or requests[end].prompts is not requests[start].prompts:
            parts.append(requests[start].prompts.rows(np.array([one.row for one in requests[start:end]])))
            start = end
    return concat(parts).with_columns(
        ticket=np.array([one.ticket for one in requests], np.int64),
        max_new_tokens=np.array([one.most for one in requests], np.int64),
    )
