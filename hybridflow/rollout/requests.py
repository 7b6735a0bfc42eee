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

from hybridflow.batch import ROUTES, DataProto, Jagged
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig, SamplingConfig
from hybridflow.config.val_sets import VAL_SET, sampling_of
from hybridflow.engines.base import Completion, Extras
from hybridflow.rollout.continuation import continued, free_routes, joined
from hybridflow.rollout.placing import shares
from hybridflow.rollout.protocols import ROOM
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import response_columns

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
    val_set: str = ""
    begun: DataProto | None = None
    engine: int = -1
    is_aborted: bool = False


class Requests(ABC):
    """The part of a `RolloutService` that is the same over any engines."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._next_ticket = 0
        self._waiting: deque[list[_Request]] = deque()  # those in one list are placed together
        self._under_way: dict[int, _Request] = {}
        self._ended: dict[int, tuple[DataProto, int]] = {}  # the answer is a row of a batch

    def submit(self, prompts: DataProto, *, training: bool, begun: DataProto | None = None) -> list[int]:
        """`RolloutService.submit`: take requests in, and return a ticket for each row."""
        rows, together = prompts.select(["prompt_ids"]), dict[int, list[_Request]]()
        keys = prompts["uid"].tolist() if "uid" in prompts else range(len(prompts))
        tickets = list(range(self._next_ticket, self._next_ticket + len(prompts)))
        self._next_ticket += len(prompts)
        most = prompts[ROOM].tolist() if ROOM in prompts else [self.config.data.max_response_length] * len(prompts)
        val_sets = prompts[VAL_SET].tolist() if VAL_SET in prompts else [""] * len(prompts)
        known = {} if begun is None else {row: place for place, row in enumerate(begun["row"].tolist())}
        for row, (ticket, key) in enumerate(zip(tickets, keys, strict=True)):
            one = _Request(ticket, training, rows, row, most[row], val_sets[row])
            if begun is not None and row in known:
                answer = begun.rows(np.array([known[row]])).drop(["row"])
                if answer["finish_reason"][0] != CUT_SHORT:
                    self._ended[ticket] = (answer, 0)
                    continue
                if not self._goes_on(one, answer, answer):
                    continue
            together.setdefault(key, []).append(one)
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
        found = self._answers(tickets)
        for ticket in tickets:
            del self._ended[ticket]
        return found

    def shown(self, tickets: Sequence[int]) -> DataProto:
        """The tokens of the answers that `take` will return."""
        return self._answers(tickets, ["response_ids"])

    def begun(self, tickets: Sequence[int]) -> DataProto | None:
        """What has come of these requests, which go on: the columns of `take` and `ticket`, a row for each that has
        ended or has tokens, with the finish reason `CUT_SHORT` while it has not ended. None where there is none."""
        ended = [ticket for ticket in tickets if ticket in self._ended]
        parts = [self._answers(ended).fetch().with_columns(ticket=np.array(ended, np.int64))] if ended else []
        waiting = {one.ticket: one for group in self._waiting for one in group}
        left = {ticket: one for ticket in tickets if (one := self._under_way.get(ticket) or waiting.get(ticket))}
        engines = sorted({one.engine for one in left.values() if one.ticket in self._under_way and one.training})
        for answers in self._so_far(engines) if engines else ():
            found = answers.fetch()
            for row, ticket in enumerate(found["ticket"].tolist()):
                if (one := left.pop(ticket, None)) is not None:
                    rest = found.rows(np.array([row]))
                    whole = rest if one.begun is None else joined(one.begun, rest)
                    parts.append(whole.with_columns(ticket=rest["ticket"]))
        parts += [one.begun.with_columns(ticket=np.array([one.ticket])) for one in left.values() if one.begun]
        return DataProto.concat(parts) if parts else None

    def _answers(self, tickets: Sequence[int], names: Sequence[str] | None = None) -> DataProto:
        rows: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        batches: dict[int, DataProto] = {}
        for place, ticket in enumerate(tickets):
            batch, row = self._ended[ticket]
            batches[id(batch)] = batch if names is None else batch.select(names)
            rows.setdefault(id(batch), []).append(row)
            places.setdefault(id(batch), []).append(place)
        found = concat([batch.rows(np.array(rows[key])) for key, batch in batches.items()])
        return found.reorder(np.argsort(np.concatenate([places[key] for key in batches])))

    def abort(self, tickets: Sequence[int], *, keep: bool = False) -> None:
        """End these requests wherever they are, as `RolloutService.abort` says."""
        wanted, at_engines = frozenset(tickets), dict[int, list[int]]()
        waiting = [one for group in self._waiting for one in group if one.ticket in wanted]
        if waiting:
            left = ([one for one in group if one.ticket not in wanted] for group in self._waiting)
            self._waiting = deque(group for group in left if group)
        for one in (self._under_way[ticket] for ticket in tickets if ticket in self._under_way):
            one.is_aborted = True
            at_engines.setdefault(one.engine, []).append(one.ticket)
        if keep:
            self._end_aborted(waiting)
        else:
            for ticket in tickets:
                self._under_way.pop(ticket, None)
                self._ended.pop(ticket, None)
        if at_engines:
            self._abort(dict(sorted(at_engines.items())))

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
        alike: dict[tuple[bool, str], dict[int, list[_Request]]] = {}  # what is sampled in one way
        for one in (one for group in groups for one in group):
            parts = alike.setdefault((not one.training, one.val_set), {})
            parts.setdefault(one.engine, []).append(one)
        for (validating, _), parts in sorted(alike.items()):
            self._ask(not validating, {engine: _rows(part) for engine, part in sorted(parts.items())})

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
            cut += reason == CUT_SHORT
            if reason != CUT_SHORT:
                self._ended[ticket] = (whole, 0)
            elif one.is_aborted:
                self._ended[ticket] = (_ended_as("abort", whole), 0)
            elif self._goes_on(one, whole, rest):
                self._waiting.appendleft([one])
        return cut

    def _goes_on(self, one: _Request, begun: DataProto, added: DataProto) -> bool:
        """Make a request one that goes on from its last token. False where it has ended with that."""
        one.most -= int(added.lengths("response_ids")[0])
        if one.most < 1:  # its engine was lost between the last token and the word that it is the last
            self._ended[one.ticket] = (_ended_as("length", begun), 0)
            return False
        one.prompts, one.row = continued(one.prompts.rows(np.array([one.row])).fetch(), added), 0
        one.begun = begun
        return True

    def _ask_again(self) -> None:
        """Let all requests under way wait again: the workers that had them are gone."""
        lost, self._under_way = list(self._under_way.values()), {}
        self._end_aborted([one for one in lost if one.is_aborted])
        self._waiting.extendleft([one] for one in reversed(lost) if not one.is_aborted)

    def _end_aborted(self, requests: Sequence[_Request]) -> None:
        """End requests that no engine has, with what engines had made of them before."""
        for one in requests:
            self._ended[one.ticket] = (_ended_as("abort", one.begun or self._nothing(one)), 0)

    def _nothing(self, one: _Request) -> DataProto:
        """The answer of a request that no engine has begun."""
        answer = response_columns([Completion([], [], "abort", ())], extras_for(self.config, one.training))
        if not (one.training and derived.needs_engine_routes(self.config)):
            return answer
        routes = free_routes(self.config, int(one.prompts.lengths("prompt_ids")[one.row]))
        return answer.with_columns(**{ROUTES: Jagged.from_rows([routes], np.int16)})

    @abstractmethod
    def _serving(self) -> Sequence[int]:
        """The engines that may be asked, one at least; EnginesLostError where there is none."""

    @abstractmethod
    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        """Bring each engine its rows: ticket, prompt_ids, max_new_tokens, and of a named set `VAL_SET`."""

    @abstractmethod
    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        """What of these engines has ended, after waiting up to `wait_s` for all: batches with the tickets."""

    @abstractmethod
    def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        """What has come of all training requests of these engines, which go on; see `RolloutWorker.so_far`."""

    @abstractmethod
    def _leave_out_lost(self, answers: int) -> None:
        """Ask no engine again that has cut so many answers short; EnginesLostError where none is left."""

    @abstractmethod
    def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        """Have each engine end these requests. What had come of them is collected like other answers."""

    @abstractmethod
    def _forget(self, engines: Sequence[int]) -> None:
        """Have these engines give up what they were asked."""


def sampling_for(config: RunConfig, training: bool, asked: DataProto) -> SamplingConfig:
    """How the rows that `Requests` asks of an engine at once are sampled."""
    return config.rollout.sampling if training else sampling_of(config, asked[VAL_SET][0] if VAL_SET in asked else "")


def extras_for(config: RunConfig, training: bool) -> Extras:
    """What engines bring besides tokens and log-probs. Validation has no use for any of it, and it is large."""
    return Extras(training and derived.needs_engine_routes(config), training and derived.needs_support(config))


def concat(parts: Sequence[DataProto]) -> DataProto:
    """The rows of all parts. Columns in the store and columns here do not make one column: where both come together,
    all are fetched."""
    return DataProto.concat([part.fetch() for part in parts] if len({part.deferred for part in parts}) > 1 else parts)


def _ended_as(reason: str, answer: DataProto) -> DataProto:
    return answer.with_columns(finish_reason=np.array([reason], dtype=object))


def _rows(requests: Sequence[_Request]) -> DataProto:
    """What an engine is asked, in this order."""
    parts: list[DataProto] = []
    start = 0
    for end in range(1, len(requests) + 1):
        if end == len(requests) or requests[end].prompts is not requests[start].prompts:
            parts.append(requests[start].prompts.rows(np.array([one.row for one in requests[start:end]])))
            start = end
    named = {VAL_SET: np.array([one.val_set for one in requests], object)} if requests[0].val_set else {}
    return concat(parts).with_columns(
        ticket=np.array([one.ticket for one in requests], np.int64),
        max_new_tokens=np.array([one.most for one in requests], np.int64),
        **named,
    )
