"""Conversations over a rollout service: an agent loop for each prompt, all at the same time.

A conversation is a task of one event loop, which runs in the caller's thread while it polls: there is no thread for a
conversation. What they ask goes to the engines request by request, and tools go on beside them.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.agents.call_reading import format_of
from hybridflow.agents.completions import CompletionServer
from hybridflow.agents.conversation import Conversation, ConversationOver, Sampled
from hybridflow.agents.episodes import EpisodeError, Episodes
from hybridflow.agents.formats.base import FORMATS
from hybridflow.agents.loops.base import LOOPS
from hybridflow.agents.toolbox import toolbox
from hybridflow.agents.tools.base import Toolbox, ToolLostError
from hybridflow.batch import ROUTED, ROUTES, SUPPORT, DataProto, Jagged, Supports, objects, support_columns
from hybridflow.config import derived
from hybridflow.config.registry import describe_error
from hybridflow.config.schema import RunConfig
from hybridflow.config.val_sets import VAL_SET, val_sets
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import HybridFlowError
from hybridflow.rollout.continuation import free_routes
from hybridflow.rollout.protocols import ROOM, RolloutService
from hybridflow.workers.requests import CUT_SHORT

# besides those of `RolloutService.take`: what the reward sees as the response (the last answer), the messages after
# the prompt, the number of answers and of tools called, what went wrong in the agent loop (None: nothing), and the
# rewards that the loop gave, where it gives any
COLUMNS = ("answer_text", "messages", "turns", "tool_calls", "agent_failure")
TURN_REWARDS = "turn_rewards"
_SAMPLED = ("response_ids", "rollout_log_probs", "response_versions")
_ROW = ("data_source", "ground_truth", "extra_info")
SINGLE_TURN = "single_turn"  # the loop that needs no conversation
_POLL_S = 0.25
_CLOSE_S = 5.0
# while no engine works, the longest wait for environments and programs that are at work, and between two looks at them
_TOGETHER_S, _STEP_S = 2.0, 0.001
_SETTLED = 10  # times that the event loop goes round without another conversation asking
_log = logging.getLogger(__name__)


class Conversations:
    """`RolloutService` whose answers are conversations. They move on in the caller's thread, while it polls.

    Args:
        engines: answer what conversations ask.
        tokenizer: its chat template continues a conversation.
        logs: the folder for what environments print; None: with this process.

    Raises:
        ConfigError: an entry of `rollout.agent` cannot be found.
        DataError: the chat template cannot show an observation after an answer.
    """

    def __init__(
        self, engines: RolloutService, tokenizer: Tokenizer, config: RunConfig, logs: Path | None = None
    ) -> None:
        self.engines, self.tokenizer, self.config = engines, tokenizer, config
        self.agent = config.rollout.agent
        log_path = None if logs is None else logs / "environments.log"
        self._episodes = None if self.agent.environment is None else Episodes(self.agent, log_path)
        self._agent_loop, self._tools = LOOPS.get(self.agent.loop), self._toolbox()
        sets = val_sets(config).items()
        self._tokenizers = {name: tokenizer.with_template(one.chat_template_kwargs) for name, one in sets}
        role = self.agent.observation_role
        for one in self._tokenizers.values():
            one.template.check(role, with_calls=role == "tool" and self.agent.loop == "tools")
        self._next_ticket = 0
        self._held: dict[int, tuple[Conversation, asyncio.Task[None]]] = {}
        self._waiting: list[_Ask] = []
        self._under_way: dict[int, _Ask] = {}  # by the engines' tickets
        self._records: dict[int, _Record] = {}
        self._asked = asyncio.Event()
        self._moved = time.monotonic()
        self._events = asyncio.new_event_loop()
        self._completions = CompletionServer()
        weakref.finalize(self, _close, self._events, self._completions)

    def _toolbox(self) -> Toolbox:
        template, chosen = self.tokenizer.template, self.agent.call_format
        found = toolbox(self.config, thinking_open=template.opens_thinking)
        shown = format_of(template.example_call) if found.tools and template.example_call else None
        if shown not in (None, chosen) and chosen in FORMATS.names():
            _log.warning(
                "rollout.agent.call_format=%s, and the chat template writes calls as %s: the policy may never call a "
                "tool; set rollout.agent.call_format=%s",
                *(chosen, shown, shown),
            )
        return found

    def submit(self, prompts: DataProto, *, training: bool, begun: DataProto | None = None) -> list[int]:
        """Begin a conversation for each prompt, and return a ticket for each.

        Args:
            begun: the answers of such conversations, with `row` [b]. Agent loops run from the beginning, and are given
                these answers for as long as they show the policy what it was shown before.
        """
        rows = prompts.select([name for name in ("prompt_ids", "uid", VAL_SET, ROOM, *_ROW) if name in prompts]).fetch()
        uids = rows["uid"].tolist() if "uid" in rows else [None] * len(rows)
        names = rows[VAL_SET].tolist() if VAL_SET in rows else [""] * len(rows)
        room = rows[ROOM].tolist() if ROOM in rows else [self.config.data.max_response_length] * len(rows)
        tickets = list(range(self._next_ticket, self._next_ticket + len(rows)))
        self._next_ticket += len(rows)
        recorded = _recorded(begun)
        for number, (ticket, ids) in enumerate(zip(tickets, rows.jagged("prompt_ids"), strict=True)):
            self._records[ticket] = _Record(training, recorded.get(number, deque()))
            conversation = Conversation(
                prompt=ids.tolist(),
                row={name: rows[name][number] for name in _ROW if name in rows},
                config=self.agent,
                tokenizer=self._tokenizers[names[number]],
                sample=partial(self._sample, training, names[number], ticket, uids[number]),
                room=room[number],
                episodes=self._episodes,
                endpoint=self._completions.endpoint,
            )
            self._held[ticket] = conversation, self._events.create_task(self._one(conversation))
        self._moved = time.monotonic()
        return tickets

    def poll(self) -> None:
        """Let conversations go on: ask the engines, wait a moment for them or for what works beside them.

        Raises:
            HybridFlowError: what `engines.poll` raises.
        """
        self._settle()
        self._send()
        if self._under_way:
            self.engines.poll()
            self._receive()
        else:
            self._events.run_until_complete(self._wait(_POLL_S))
            self._end_idle()

    def ended(self, tickets: Iterable[int]) -> bool:
        """Whether all of these conversations have ended."""
        return all(self._held[ticket][1].done() for ticket in tickets)

    def take(self, tickets: Sequence[int]) -> DataProto:
        """The conversations, in the order of the tickets; they can be taken once.

        Raises:
            HybridFlowError: the agent loop failed in all of them.
        """
        found = [self._held.pop(ticket)[0] for ticket in tickets]
        records = [self._records.pop(ticket) for ticket in tickets]
        failed = [one.failure for one in found if one.failure]
        if failed and len(failed) == len(found):
            raise HybridFlowError(
                f"rollout.agent.loop={self.agent.loop} failed in all {len(failed)} conversations, the first with: "
                f"{failed[0]}"
            )
        if failed:
            _log.warning("%d of %d conversations failed, the first: %s", len(failed), len(found), failed[0])
        batch = as_batch(found, with_rewards=self._agent_loop.gives_rewards)
        if any(one.training for one in records) and derived.needs_support(self.config):
            batch = batch.with_columns(**support_columns([Supports.concat(one.supports) for one in found]))
        if not (any(one.training for one in records) and derived.needs_engine_routes(self.config)):
            return batch
        rows = [_routes(one, self.config) for one in found]
        known = np.array([0 if one.routes is None or one.failure else len(one.routes) for one in found], np.int64)
        return batch.with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)}).with_columns(**{ROUTED: known})

    def shown(self, tickets: Sequence[int]) -> DataProto:
        """The conversations as `take` will return them, without the experts of their tokens."""
        found = [self._held[ticket][0] for ticket in tickets]
        return as_batch(found, with_rewards=self._agent_loop.gives_rewards)

    def begun(self, tickets: Sequence[int]) -> DataProto | None:
        """The answers of these conversations, in order, with `shown`, which tells what the policy had been shown."""
        parts: list[DataProto] = []
        under_way = {ask.ticket: number for number, ask in self._under_way.items()}
        waiting = {ask.ticket: ask for ask in self._waiting}
        now = self.engines.begun([under_way[ticket] for ticket in tickets if ticket in under_way])
        at = {} if now is None else {number: row for row, number in enumerate(now["ticket"].tolist())}
        for ticket in tickets:
            conversation, record = self._held[ticket][0], self._records[ticket]
            whole = [*conversation.prompt, *conversation.tokens]
            rows = [
                batch.rows(np.array([row])).with_columns(shown=np.array([_digest(whole[:length])], dtype=object))
                for length, batch, row in record.answers
            ]
            if now is not None and (number := under_way.get(ticket)) in at:
                assert number is not None
                shown = np.array([_digest(self._under_way[number].tokens)], dtype=object)
                rows.append(now.rows(np.array([at[number]])).with_columns(shown=shown))
            elif ticket in waiting and (begun := waiting[ticket].begun) is not None:
                shown = np.array([_digest(waiting[ticket].tokens)], dtype=object)
                rows.append(begun.with_columns(shown=shown))
            else:
                rows += [one.drop(["row"]) for one in record.before]
            parts += [row.with_columns(ticket=np.array([ticket])) for row in rows]
        return DataProto.concat(parts) if parts else None

    def abort(self, tickets: Sequence[int], *, keep: bool = False) -> None:
        """End these conversations, and what they ask of engines. With `keep` what was said before is kept; the answer
        under way is not."""
        wanted = frozenset(tickets)
        self._waiting = [ask for ask in self._waiting if ask.ticket not in wanted]
        asked = [ticket for ticket, ask in self._under_way.items() if ask.ticket in wanted]
        for ticket in asked:
            del self._under_way[ticket]
        ended = [(conversation, task) for conversation, task in map(self._held.__getitem__, tickets) if not task.done()]
        for conversation, _ in ended:
            conversation.end, conversation.finish_reason = "aborted", "abort"
        self._events.run_until_complete(_cancel([task for _, task in ended]))
        if not keep:
            for ticket in tickets:
                del self._held[ticket], self._records[ticket]
        if asked:
            self.engines.abort(asked)

    def forget(self) -> None:
        """Give up all conversations."""
        self._events.run_until_complete(_cancel([task for _, task in self._held.values()]))
        self._held, self._waiting, self._under_way, self._records = {}, [], {}, {}
        self.engines.forget()

    def sleep(self) -> None:
        """Have the engines give their memory back."""
        self.engines.sleep()

    def wake(self, tags: Sequence[str]) -> None:
        """Have the engines take the memory of these parts again."""
        self.engines.wake(tags)

    # ---- in the event loop

    async def _one(self, conversation: Conversation) -> None:
        try:
            await self._agent_loop.function(conversation, self._tools)
        except ConversationOver as over:
            conversation.end = str(over)
        except (EpisodeError, ToolLostError) as error:
            conversation.failure = str(error)
        except (Exception, SystemExit) as error:  # of the user's loop: this conversation is lost, the run goes on
            conversation.failure = describe_error(error, Path(inspect.getfile(self._agent_loop.function)))
        else:
            conversation.end = "the agent loop returned"
        self._asked.set()  # `_wait` looks again

    async def _sample(
        self, training: bool, val_set: str, ticket: int, uid: int | None, tokens: Sequence[int], most: int
    ) -> Sampled:
        """`conversation.Sample`: wait for an engine."""
        record, begun = self._records[ticket], None
        if record.before:
            again = record.before.popleft()
            if again["shown"][0] != _digest(tokens) or again.lengths("response_ids")[0] > most:
                record.before.clear()  # a tool or an environment said something else: the policy is asked from here on
            elif again["finish_reason"][0] == CUT_SHORT:
                begun = again.drop(["row", "shown"])
            else:
                record.answers.append((len(tokens), again.drop(["row", "shown"]), 0))
                parts = {name: again.jagged(name).row(0) for name in _columns_of(again)}
                return _sampled(parts, str(again["finish_reason"][0]), len(tokens), most)
        ask = _Ask(training, val_set, ticket, uid, tokens, most, begun, self._events.create_future())
        self._waiting.append(ask)
        self._asked.set()
        return await ask.answer

    def _settle(self) -> None:
        """Let every conversation that can go on at once do so. While no engine works, environments and programs are
        waited for, so that what follows their steps goes to the engines together."""

        async def rounds() -> None:
            quiet, before, end = 0, -1, time.monotonic() + _TOGETHER_S
            while quiet < _SETTLED:
                is_stepping = self._is_stepping() and time.monotonic() < end
                is_quiet = len(self._waiting) == before and not is_stepping
                quiet, before = (quiet + 1 if is_quiet else 0), len(self._waiting)
                await asyncio.sleep(_STEP_S if is_stepping else 0)

        self._events.run_until_complete(rounds())

    def _is_stepping(self) -> bool:
        if self._under_way:
            return False
        return self._completions.is_active or (self._episodes is not None and self._episodes.waiting)

    async def _wait(self, seconds: float) -> None:
        """Until a conversation asks or ends, or so long."""
        self._asked.clear()
        if self._waiting or all(task.done() for _, task in self._held.values()):
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), seconds)
            self._moved = time.monotonic()

    # ---- between the conversations and the engines

    def _send(self) -> None:
        alike: dict[tuple[bool, str], list[_Ask]] = {}  # what is sampled in one way
        for ask in self._waiting:
            if not ask.answer.done():
                alike.setdefault((not ask.training, ask.val_set), []).append(ask)
        for (validating, val_set), asks in sorted(alike.items()):
            asks.sort(key=lambda ask: ask.ticket)  # not in the order in which environments happened to answer
            rows = Jagged.from_rows([ask.tokens for ask in asks], np.int64)
            room = np.array([ask.most for ask in asks], np.int64)
            # the samples of a prompt begin alike, and an engine computes that once
            uid = np.array([-1 - n if ask.uid is None else ask.uid for n, ask in enumerate(asks)], np.int64)
            prompts = DataProto.from_columns({"prompt_ids": rows, ROOM: room, "uid": uid})
            if val_set:
                prompts = prompts.with_columns(**{VAL_SET: objects([val_set] * len(asks))})
            begun = [ask.begun.with_columns(row=np.array([n])) for n, ask in enumerate(asks) if ask.begun is not None]
            known = DataProto.concat(begun) if begun else None
            tickets = self.engines.submit(prompts, training=not validating, begun=known)
            self._under_way |= dict(zip(tickets, asks, strict=True))
            self._moved = time.monotonic()
        self._waiting = []

    def _receive(self) -> None:
        done = [ticket for ticket in self._under_way if self.engines.ended([ticket])]
        if not done:
            return
        found = self.engines.take(done).fetch()
        columns = {name: found.jagged(name) for name in _columns_of(found)}
        for row, (ticket, reason) in enumerate(zip(done, found["finish_reason"], strict=True)):
            parts = {name: column.row(row) for name, column in columns.items()}
            ask = self._under_way.pop(ticket)
            if not ask.answer.done():
                self._records[ask.ticket].answers.append((len(ask.tokens), found, row))
                ask.answer.set_result(_sampled(parts, str(reason), len(ask.tokens), ask.most))
        self._moved = time.monotonic()
        self._settle()

    def _end_idle(self) -> None:
        """End conversations that do nothing, once that has lasted for `rollout.agent.timeout_s`."""
        if time.monotonic() - self._moved < self.agent.timeout_s or self._waiting:
            return
        idle = [(conversation, task) for conversation, task in self._held.values() if not task.done()]
        for conversation, task in idle:
            conversation.failure = f"nothing happened for {self.agent.timeout_s:g} s"
            task.cancel()
        self._settle()


def _close(events: asyncio.AbstractEventLoop, completions: CompletionServer) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _end(events, completions)
    else:  # Python collects in any thread, also in one where another loop runs
        thread = threading.Thread(target=_end, args=(events, completions))
        thread.start()
        thread.join(_CLOSE_S)


def _end(events: asyncio.AbstractEventLoop, completions: CompletionServer) -> None:
    events.run_until_complete(completions.close())
    events.run_until_complete(_cancel(list(asyncio.all_tasks(events))))
    events.close()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, eq=False)
class _Ask:
    """What a conversation waits for."""

    training: bool
    val_set: str
    ticket: int  # of the conversation
    uid: int | None
    tokens: Sequence[int]
    most: int
    begun: DataProto | None  # tokens of the answer, which an engine goes on with
    answer: asyncio.Future[Sampled]


@dataclass(frozen=True, eq=False)
class _Record:
    """The answers of one conversation: those of an earlier process that it has not come to yet, and those that it was
    given, each with the number of tokens that it follows, as a row of a batch."""

    training: bool
    before: deque[DataProto]
    answers: list[tuple[int, DataProto, int]] = field(default_factory=list)


def _recorded(begun: DataProto | None) -> dict[int, deque[DataProto]]:
    """The answers of each conversation, by its row of the prompts."""
    found: dict[int, deque[DataProto]] = {}
    for place, row in enumerate([] if begun is None else begun["row"].tolist()):
        assert begun is not None
        found.setdefault(row, deque()).append(begun.rows(np.array([place])))
    return found


def _digest(tokens: Sequence[int]) -> str:
    """A digest of the tokens that an answer follows."""
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()


def _columns_of(answers: DataProto) -> list[str]:
    """The columns of an answer's tokens."""
    return [*_SAMPLED, *(name for name in (ROUTES, *SUPPORT) if name in answers)]


def _sampled(columns: Mapping[str, np.ndarray], reason: str, asked: int, most: int) -> Sampled:
    """An answer to so many tokens, cut to its room; `columns` are those of `_columns_of`."""
    ids, log_probs, versions = (columns[name][:most] for name in _SAMPLED)
    routes = columns[ROUTES][: asked + most] if ROUTES in columns else None
    reason = "length" if len(columns["response_ids"]) > most else reason
    support = Supports(*(columns[name] for name in SUPPORT)).take(slice(most)) if SUPPORT[0] in columns else None
    return Sampled(ids, log_probs, versions, reason, routes, support)


def _routes(conversation: Conversation, config: RunConfig) -> np.ndarray:
    """Experts `[prompt and conversation, layers, k]`; of what follows the last request they are not known."""
    routes = free_routes(config, len(conversation.prompt) + len(conversation.tokens))
    if conversation.routes is not None and conversation.failure is None:
        routes[: len(conversation.routes)] = conversation.routes
    return routes


def as_batch(conversations: Sequence[Conversation], *, with_rewards: bool = False) -> DataProto:
    """A row for each conversation. Nothing of one that failed was sampled as far as training is concerned."""
    masks = [np.array(one.mask, np.bool_) & (one.failure is None) for one in conversations]
    columns: dict[str, Any] = {
        "response_ids": Jagged.from_rows([one.tokens for one in conversations], np.int64),
        "response_mask": Jagged.from_rows(masks, np.bool_),
        "rollout_log_probs": Jagged.from_rows([one.log_probs for one in conversations], np.float32),
        "response_versions": Jagged.from_rows([one.versions for one in conversations], np.int64),
        "finish_reason": objects([one.finish_reason for one in conversations]),
        "weight_version": objects([str(one.versions[-1]) if one.versions else "" for one in conversations]),
        "answer_text": objects([_last_answer(one) for one in conversations]),
        "messages": objects([one.messages for one in conversations]),
        "turns": np.array([one.answered for one in conversations], np.int64),
        "tool_calls": np.array([one.calls for one in conversations], np.int64),
        "agent_failure": objects([one.failure for one in conversations]),
    }
    if with_rewards:
        columns[TURN_REWARDS] = objects([one.rewards for one in conversations])
    return DataProto.from_columns(columns)


def _last_answer(conversation: Conversation) -> str:
    said = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
    return said[-1] if said else ""


def conversing(
    engines: RolloutService, tokenizer: Tokenizer, config: RunConfig, logs: Path | None = None
) -> RolloutService:
    """The engines, with conversations over them where `rollout.agent.loop` holds any; the arguments are those of
    `Conversations`."""
    return Conversations(engines, tokenizer, config, logs) if config.rollout.agent.loop != SINGLE_TURN else engines
