"""Conversations over a rollout service: an agent loop for each prompt, all at the same time.

The engines are asked in rounds: what conversations wait for an answer is one batch, while tools that take longer go on
beside it and their conversations join a later round. There is no thread for a conversation.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.agents.conversation import Conversation, ConversationOver, Sampled
from hybridflow.agents.loops.base import LOOPS
from hybridflow.agents.tools.base import Toolbox
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.registry import describe_error
from hybridflow.config.schema import RunConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import HybridFlowError
from hybridflow.rollout.protocols import ROOM, RolloutService

# besides those of `RolloutService.generate`: what the reward sees as the response (the last answer), the messages after
# the prompt, the number of answers and of tools called, and what went wrong in the agent loop (None: nothing)
COLUMNS = ("answer_text", "messages", "turns", "tool_calls", "agent_failure")
_ROW = ("data_source", "ground_truth", "extra_info")
SINGLE_TURN = "single_turn"  # the loop that needs no conversation
_SETTLED = 10  # times that the event loop goes round without another conversation asking
_log = logging.getLogger(__name__)


class Conversations:
    """`RolloutService` whose answers are conversations.

    Args:
        engines: answer the prompts of a round.
        tokenizer: its chat template continues a conversation.

    Raises:
        ConfigError: an entry of `rollout.agent` cannot be found.
        DataError: the chat template cannot show an observation after an answer.
    """

    def __init__(self, engines: RolloutService, tokenizer: Tokenizer, config: RunConfig) -> None:
        self.engines, self.tokenizer, self.config = engines, tokenizer, config
        self.agent = config.rollout.agent
        self._loop, self._tools = LOOPS.get(self.agent.loop), Toolbox(self.agent)
        tokenizer.continuation(self.agent.observation_role, ["?"], 1)

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        """Hold a conversation for each prompt.

        Raises:
            HybridFlowError: what `engines.generate` raises; or the agent loop failed in every conversation.
        """
        rows = prompts.select([name for name in ("prompt_ids", *_ROW) if name in prompts]).fetch()
        asking = _Asking(self.engines, training)
        room = self.config.data.max_response_length
        conversations = [
            Conversation(
                prompt=ids.tolist(),
                row={name: rows[name][number] for name in _ROW if name in rows},
                config=self.agent,
                tokenizer=self.tokenizer,
                sample=asking.sample,
                room=room,
            )
            for number, ids in enumerate(rows.jagged("prompt_ids"))
        ]
        asyncio.run(self._hold(conversations, asking))
        failed = [one for one in conversations if one.failure]
        if failed and len(failed) == len(conversations):
            raise HybridFlowError(
                f"rollout.agent.loop={self.agent.loop} failed in all {len(failed)} conversations; the first: "
                f"{failed[0].failure}"
            )
        if failed:
            _log.warning("%d of %d conversations failed: %s", len(failed), len(conversations), failed[0].failure)
        return as_batch(conversations)

    def sleep(self) -> None:
        """Have the engines give their memory back."""
        self.engines.sleep()

    def wake(self, tags: Sequence[str]) -> None:
        """Have the engines take the memory of these parts again."""
        self.engines.wake(tags)

    async def _hold(self, conversations: Sequence[Conversation], asking: _Asking) -> None:
        tasks = [asyncio.ensure_future(self._one(conversation)) for conversation in conversations]
        try:
            while True:
                await _settle(asking)
                if asking.waiting:
                    asking.answer()
                    continue
                if not (running := [task for task in tasks if not task.done()]):
                    break
                asked = asyncio.ensure_future(asking.asked.wait())
                done, _ = await asyncio.wait(
                    [*running, asked], timeout=self.agent.timeout_s, return_when="FIRST_COMPLETED"
                )
                asked.cancel()
                await _settle(asking)  # what was ready when the time ran out has gone on
                if not done and not asking.waiting:
                    self._end_idle(conversations, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, conversation: Conversation) -> None:
        try:
            await self._loop(conversation, self._tools)
        except ConversationOver as over:
            conversation.end = str(over)
        except (Exception, SystemExit) as error:  # of the user's loop: this conversation is lost, the run goes on
            conversation.failure = describe_error(error, Path(inspect.getfile(self._loop)))
        else:
            conversation.end = conversation.end or "the agent loop returned"

    def _end_idle(self, conversations: Sequence[Conversation], tasks: Sequence[asyncio.Task[None]]) -> None:
        for conversation, task in zip(conversations, tasks, strict=True):
            if not task.done():
                conversation.failure = f"nothing happened for {self.agent.timeout_s:g} s"
                task.cancel()


class _Asking:
    """What conversations wait for."""

    def __init__(self, engines: RolloutService, training: bool) -> None:
        self.engines, self.training = engines, training
        self.waiting: list[tuple[Sequence[int], int, asyncio.Future[Sampled]]] = []
        self.asked = asyncio.Event()

    async def sample(self, tokens: Sequence[int], most: int) -> Sampled:
        """`conversation.Sample`: wait for the next round's answer."""
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self.waiting.append((tokens, most, answer))
        self.asked.set()
        return await answer

    def answer(self) -> None:
        """Have the engines answer everything that waits."""
        waiting, self.waiting = self.waiting, []
        self.asked.clear()
        prompts = Jagged.from_rows([np.asarray(tokens, np.int64) for tokens, _, _ in waiting], np.int64)
        asked = DataProto.from_columns(
            {"prompt_ids": prompts, ROOM: np.array([most for _, most, _ in waiting], np.int64)}
        )
        found = self.engines.generate(asked, training=self.training).fetch()
        names = ("response_ids", "rollout_log_probs", "response_versions")
        columns = [found.jagged(name) for name in names]
        for (_, most, answer), reason, *row in zip(waiting, found["finish_reason"], *columns, strict=True):
            ids, log_probs, versions = (part[:most] for part in row)
            if not answer.done():
                answer.set_result(Sampled(ids, log_probs, versions, "length" if len(row[0]) > most else str(reason)))


async def _settle(asking: _Asking) -> None:
    """Let every conversation that can go on at once do so."""
    quiet, before = 0, -1
    while quiet < _SETTLED:
        quiet, before = (quiet + 1 if len(asking.waiting) == before else 0), len(asking.waiting)
        await asyncio.sleep(0)


def as_batch(conversations: Sequence[Conversation]) -> DataProto:
    """A row for each conversation. Nothing of one that failed was sampled as far as training is concerned."""
    masks = [np.array(one.mask, np.bool_) & (one.failure is None) for one in conversations]
    versions = [np.array(one.versions, np.int64) for one in conversations]
    columns: dict[str, Any] = {
        "response_ids": Jagged.from_rows([np.array(one.tokens, np.int64) for one in conversations], np.int64),
        "response_mask": Jagged.from_rows(masks, np.bool_),
        "rollout_log_probs": Jagged.from_rows(
            [np.array(one.log_probs, np.float32) for one in conversations], np.float32
        ),
        "response_versions": Jagged.from_rows(versions, np.int64),
        "finish_reason": _objects([one.finish_reason for one in conversations]),
        "weight_version": _objects([str(row[-1]) if len(row) else "" for row in versions]),
        "answer_text": _objects([_last_answer(one) for one in conversations]),
        "messages": _objects([one.messages for one in conversations]),
        "turns": np.array([one.turns for one in conversations], np.int64),
        "tool_calls": np.array([one.calls for one in conversations], np.int64),
        "agent_failure": _objects([one.failure for one in conversations]),
    }
    return DataProto.from_columns(columns)


def _last_answer(conversation: Conversation) -> str:
    said = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
    return said[-1] if said else ""


def _objects(values: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):  # an assignment of all at once would take lists apart
        found[number] = value
    return found


def conversing(engines: RolloutService, tokenizer: Tokenizer, config: RunConfig) -> RolloutService:
    """The engines, with conversations over them where `rollout.agent.loop` holds any."""
    return Conversations(engines, tokenizer, config) if config.rollout.agent.loop != SINGLE_TURN else engines
