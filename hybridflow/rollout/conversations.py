"""Conversations with the engines: one agent loop per prompt, all running concurrently.

A conversation is a task in the driver's event loop, not a thread. Its requests are sent to the
engines one at a time, and its tools run between them.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
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
from hybridflow.batch import (
    ROUTED,
    ROUTES,
    SUPPORT,
    DataProto,
    Jagged,
    Supports,
    objects,
    support_columns,
)
from hybridflow.config import derived
from hybridflow.config.registry import describe_error
from hybridflow.config.schema import RunConfig
from hybridflow.config.val_sets import VAL_SET, val_sets
from hybridflow.data.image_tokens import IMAGES
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import HybridFlowError
from hybridflow.rollout.continuation import free_routes
from hybridflow.rollout.protocols import ROOM, Engines, SyncReport
from hybridflow.rollout.requests import Request, Requests, available, one_row, values
from hybridflow.single_controller import in_thread
from hybridflow.workers.requests import CUT_SHORT

# in addition to those of `Rollouts.batch`: the response for the reward (the last answer), the
# messages after the prompt, the numbers of answers and tool calls, and the agent loop's error
# (None: no error)
COLUMNS = ("answer_text", "messages", "turns", "tool_calls", "agent_failure")
TURN_REWARDS = "turn_rewards"
_SAMPLED = ("response_ids", "rollout_log_probs", "response_versions")
_ROW = ("data_source", "ground_truth", "extra_info")
_COLUMNS = ("uid", VAL_SET, ROOM, *_ROW)
SINGLE_TURN = "single_turn"  # the loop that needs no conversations
_POLL_S = 0.25
# while no engine is busy: maximum wait for busy environments and programs, and polling interval
_TOGETHER_S = 2.0
_STEP_S = 0.001
_SETTLED = 10  # iterations of the event loop without a new request
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sample:
    """A conversation and its task.

    Attributes:
        before: answers that an earlier process recorded and that have not been replayed yet.
        answers: (number of preceding tokens, batch, row) for each answer so far.
        request: the pending request.
        images: a one-row batch with the images of the prompt, if the run has images.
    """

    number: int
    training: bool
    val_set: str
    group: Hashable
    before: deque[DataProto]
    answers: list[tuple[int, DataProto, int]] = field(default_factory=list)
    request: Request | None = None
    images: DataProto | None = None
    conversation: Conversation = field(init=False)
    task: asyncio.Task[None] = field(init=False)

    def done(self) -> bool:
        """Return True if the conversation has finished."""
        return self.task.done()


class Conversations:
    """`Engines` whose samples are conversations: each is an agent loop that runs as a task in the
    driver's event loop.

    Args:
        engines: the engines that serve the conversations' requests.
        tokenizer: provides the chat template that renders the conversations.
        logs: folder for the environments' output; None to write it to this process's output.

    Raises:
        ConfigError: an entry of `rollout.agent` cannot be found.
        DataError: the chat template cannot render an observation after an answer.
    """

    def __init__(
        self, engines: Requests, tokenizer: Tokenizer, config: RunConfig, logs: Path | None = None
    ) -> None:
        self.engines = engines
        self.tokenizer = tokenizer
        self.config = config
        self.agent = config.rollout.agent
        log_path = None if logs is None else logs / "environments.log"
        self._episodes = None if self.agent.environment is None else Episodes(self.agent, log_path)
        self._agent_loop = LOOPS.get(self.agent.loop)
        self._tools = self._toolbox()
        self._tokenizers = {}
        for name, val_set in val_sets(config).items():
            self._tokenizers[name] = tokenizer.with_template(val_set.chat_template_kwargs)
        role = self.agent.observation_role
        with_calls = role == "tool" and self.agent.loop == "tools"
        for own in self._tokenizers.values():
            own.template.check(role, with_calls=with_calls)
        self._next_number = 0
        self._going_on: dict[int, _Sample] = {}
        self._moved_at = time.monotonic()
        self._completions = CompletionServer()

    def _toolbox(self) -> Toolbox:
        template = self.tokenizer.template
        chosen = self.agent.call_format
        found = toolbox(self.config, thinking_open=template.opens_thinking)
        example = template.example_call
        shown = format_of(example) if found.tools and example else None
        if shown not in (None, chosen) and chosen in FORMATS.names():
            _log.warning(
                "rollout.agent.call_format=%s, but the chat template writes calls as %s: the "
                "policy may never call a tool; set rollout.agent.call_format=%s",
                chosen,
                shown,
                shown,
            )
        return found

    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> list[_Sample]:
        """Start a conversation for each prompt.

        Args:
            begun: recorded answers of these conversations; column `row` [b] is each answer's row in
                `prompts`. Agent loops start from the beginning, and receive the recorded answers
                for as long as the policy's input tokens are the same.
        """
        rows = available(prompts, "prompt_ids", *_COLUMNS, *IMAGES).fetch()
        with_images = set(IMAGES) <= set(rows.columns)
        uids = values(rows, "uid", None)
        val_sets = values(rows, VAL_SET, "")
        room = values(rows, ROOM, self.config.data.max_response_length)
        names = available(rows, *_ROW).columns
        recorded = _recorded(begun)
        first = self._next_number
        self._next_number += len(rows)
        samples = []
        for row, ids in enumerate(rows.jagged("prompt_ids")):
            # samples of a prompt share a prefix, which an engine then computes once
            group = None if uids[row] is None else (first, uids[row])
            one = _Sample(first + row, training, val_sets[row], group, recorded.get(row, deque()))
            if with_images:
                one.images = one_row(rows.select(IMAGES), row)
            one.conversation = Conversation(
                prompt=ids.tolist(),
                row={name: rows[name][row] for name in names},
                config=self.agent,
                tokenizer=self._tokenizers[val_sets[row]],
                sample=partial(self._sample, one),
                room=room[row],
                episodes=self._episodes,
                endpoint=self._completions.endpoint,
            )
            one.task = asyncio.ensure_future(self._hold(one))
            # not in the task itself: a task cancelled before its start runs no code
            one.task.add_done_callback(partial(self._note_end, one))
            self._going_on[one.number] = one
            samples.append(one)
        self._moved_at = time.monotonic()
        return samples

    async def advance(self) -> None:
        """Advance all conversations: send their requests, and wait briefly for engines, tools or
        environments.

        Raises:
            HybridFlowError: errors of `Requests.advance`.
        """
        await self._settle()
        if self.engines.is_idle:
            await self._wait(_POLL_S)
            self._end_idle()
        else:
            await self.engines.advance()
            self._moved_at = time.monotonic()
            await self._settle()

    async def answers(self, samples: Sequence[_Sample]) -> DataProto:
        """Wait until all samples have finished, and return their answers as a batch."""
        while not all(map(_Sample.done, samples)):
            await self.advance()
        return await in_thread(partial(self.batch, samples))

    def batch(self, samples: Sequence[_Sample]) -> DataProto:
        """Return these conversations as a batch, in order.

        Raises:
            HybridFlowError: the agent loop failed in every conversation.
        """
        found = [one.conversation for one in samples]
        failed = [one.failure for one in found if one.failure]
        if failed and len(failed) == len(found):
            raise HybridFlowError(
                f"rollout.agent.loop={self.agent.loop} failed in all {len(failed)} conversations; "
                f"first error: {failed[0]}"
            )
        if failed:
            _log.warning(
                "%d of %d conversations failed; first error: %s", len(failed), len(found), failed[0]
            )
        batch = as_batch(found, with_rewards=self._agent_loop.gives_rewards)
        is_training = any(one.training for one in samples)
        if is_training and derived.needs_support(self.config):
            supports = [Supports.concat(one.supports) for one in found]
            batch = batch.with_columns(**support_columns(supports))
        if not (is_training and derived.needs_engine_routes(self.config)):
            return batch
        rows = []
        known = []
        for one in found:
            rows.append(_routes(one, self.config))
            known.append(0 if one.routes is None or one.failure else len(one.routes))
        batch = batch.with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)})
        return batch.with_columns(**{ROUTED: np.array(known, np.int64)})

    def shown(self, samples: Sequence[_Sample]) -> DataProto:
        """Return the batch of these conversations (`batch`) without the columns for routed
        experts."""
        found = [one.conversation for one in samples]
        return as_batch(found, with_rewards=self._agent_loop.gives_rewards)

    async def begun(self, samples: Sequence[_Sample]) -> DataProto | None:
        """Return the answers that these conversations have received so far, in order. The column
        `shown` contains a digest of the tokens before each answer.
        """
        asking = []  # numbers of conversations
        requests = []
        for one in samples:
            if one.request is not None:
                asking.append(one.number)
                requests.append(one.request)
        now = await self.engines.begun(requests)
        # by conversation number: the row of its pending answer
        at = {}
        if now is not None:
            for row, place in enumerate(now["sample"].tolist()):
                at[asking[place]] = row
        parts: list[DataProto] = []
        places: list[int] = []
        for place, one in enumerate(samples):
            whole = [*one.conversation.prompt, *one.conversation.tokens]
            for length, batch, row in one.answers:
                shown = objects([_digest(whole[:length])])
                parts.append(one_row(batch, row).with_columns(shown=shown))
            if now is not None and one.number in at:
                shown = objects([_digest(whole)])
                answer = one_row(now, at[one.number]).drop(["sample"])
                parts.append(answer.with_columns(shown=shown))
            else:
                parts += [answer.drop(["row"]) for answer in one.before]
            places += [place] * (len(parts) - len(places))
        if not parts:
            return None
        return DataProto.concat(parts).with_columns(sample=np.array(places))

    async def abort(self, samples: Sequence[_Sample]) -> None:
        """Abort these conversations and their requests."""
        for one in samples:
            if not one.done():
                one.conversation.end = "aborted"
                one.conversation.finish_reason = "abort"
        await _cancel(samples)
        await self.engines.drop_unwanted()

    async def forget(self) -> None:
        """Abort all conversations."""
        await _cancel(list(self._going_on.values()))
        await self.engines.forget()

    async def sync(self, version: int) -> SyncReport:
        """Send the policy's weights to the engines."""
        return await self.engines.sync(version)

    async def load_metrics(self) -> dict[str, float]:
        """Return the engines' load since the last call, as metrics."""
        return await self.engines.load_metrics()

    async def sleep(self) -> None:
        """Make the engines release their device memory."""
        await self.engines.sleep()

    async def wake(self, tags: Sequence[str]) -> None:
        """Make the engines reallocate device memory for the given parts."""
        await self.engines.wake(tags)

    async def close(self) -> None:
        """Abort the conversations and stop the completions server."""
        await _cancel(list(self._going_on.values()))
        await self._completions.close()

    # ---- tasks

    async def _hold(self, one: _Sample) -> None:
        conversation = one.conversation
        try:
            await self._agent_loop.function(conversation, self._tools)
        except ConversationOver as over:
            conversation.end = str(over)
        except (EpisodeError, ToolLostError) as error:
            conversation.failure = str(error)
        except (Exception, SystemExit) as error:
            # raised by the user's loop: only this conversation fails
            file = inspect.getfile(self._agent_loop.function)
            conversation.failure = describe_error(error, Path(file))
        else:
            conversation.end = "the agent loop returned"

    def _note_end(self, one: _Sample, _: asyncio.Task[None]) -> None:
        del self._going_on[one.number]
        self.engines.asked.set()  # wakes `_wait`

    async def _sample(self, one: _Sample, tokens: Sequence[int], most: int) -> Sampled:
        """Sample the conversation's next answer (implements `conversation.Sample`)."""
        begun = None
        if one.before:
            again = one.before.popleft()
            length = again.lengths("response_ids")[0]
            answer = again.drop(["row", "shown"])
            if again["shown"][0] != _digest(tokens) or length > most:
                # a tool or an environment responded differently: stop replaying and sample from
                # here on
                one.before.clear()
            elif answer["finish_reason"][0] == CUT_SHORT:
                begun = answer
            else:
                one.answers.append((len(tokens), answer, 0))
                return sampled_of(answer, 0, len(tokens), most)
        prompt = one.conversation.prompt
        if one.images is not None and list(tokens[: len(prompt)]) != list(prompt):
            raise HybridFlowError(
                "a request must begin with the conversation's prompt, which contains the image "
                "placeholders; continue the prompt that was passed to the agent loop"
            )
        one.request = self.engines.ask(
            tokens,
            most,
            training=one.training,
            val_set=one.val_set,
            order=one.number,
            group=one.group,
            begun=begun,
            images=one.images,
        )
        try:
            answer, row = await self.engines.answer(one.request)
        finally:
            one.request = None
        one.answers.append((len(tokens), answer, row))
        return sampled_of(answer, row, len(tokens), most)

    async def _settle(self) -> None:
        """Run every conversation until it is blocked.

        While no engine is busy, also wait for environments and programs, so that the requests that
        result from their steps are sent together.
        """
        quiet = 0
        before = -1
        end = time.monotonic() + _TOGETHER_S
        while quiet < _SETTLED:
            is_stepping = self._is_stepping() and time.monotonic() < end
            is_quiet = self.engines.num_new == before and not is_stepping
            quiet = quiet + 1 if is_quiet else 0
            before = self.engines.num_new
            await asyncio.sleep(_STEP_S if is_stepping else 0)

    def _is_stepping(self) -> bool:
        if self.engines.is_working:
            return False
        if self._completions.is_active:
            return True
        return self._episodes is not None and self._episodes.waiting

    async def _wait(self, seconds: float) -> None:
        """Wait until a conversation sends a request or finishes, or until `seconds` have passed."""
        self.engines.asked.clear()
        if not self._going_on:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self.engines.asked.wait(), seconds)
            self._moved_at = time.monotonic()

    def _end_idle(self) -> None:
        """Abort all conversations if nothing has happened for `rollout.agent.timeout_s`."""
        limit = self.agent.timeout_s
        if time.monotonic() - self._moved_at < limit or not self.engines.is_idle:
            return
        for one in self._going_on.values():
            one.conversation.failure = f"no progress for {limit:g} s"
            one.task.cancel()


async def _cancel(samples: Sequence[_Sample]) -> None:
    for one in samples:
        one.task.cancel()
    await asyncio.gather(*(one.task for one in samples), return_exceptions=True)


def _recorded(begun: DataProto | None) -> dict[int, deque[DataProto]]:
    """Group recorded answers by conversation, i.e. by row of the prompts."""
    if begun is None:
        return {}
    found: dict[int, deque[DataProto]] = {}
    for place, row in enumerate(begun["row"].tolist()):
        found.setdefault(row, deque()).append(one_row(begun, place))
    return found


def _digest(tokens: Sequence[int]) -> str:
    """Return a digest of the tokens before an answer."""
    return hashlib.sha256(np.asarray(tokens, np.int64).tobytes()).hexdigest()


def sampled_of(answers: DataProto, row: int, asked: int, most: int) -> Sampled:
    """Convert an answer to `Sampled`, truncated to `most` tokens. `asked` is the number of tokens
    that precede it.
    """

    def of_tokens(name: str) -> np.ndarray:
        return answers.jagged(name).row(row)

    ids, log_probs, versions = map(of_tokens, _SAMPLED)
    reason = "length" if len(ids) > most else str(answers["finish_reason"][row])
    routes = of_tokens(ROUTES)[: asked + most] if ROUTES in answers else None
    support = None
    if SUPPORT[0] in answers:
        support = Supports(*map(of_tokens, SUPPORT)).take(slice(most))
    return Sampled(ids[:most], log_probs[:most], versions[:most], reason, routes, support)


def _routes(conversation: Conversation, config: RunConfig) -> np.ndarray:
    """Return the experts selected for the tokens of the prompt and conversation, `[tokens, layers,
    k]`. They are unknown for tokens after the last request.
    """
    routes = free_routes(config, len(conversation.prompt) + len(conversation.tokens))
    if conversation.routes is not None and conversation.failure is None:
        routes[: len(conversation.routes)] = conversation.routes
    return routes


def as_batch(conversations: Sequence[Conversation], *, with_rewards: bool = False) -> DataProto:
    """Build a batch with one row per conversation. Failed conversations have no sampled tokens, so
    they are not trained on."""

    def each(attribute: str) -> list[Any]:
        return [getattr(one, attribute) for one in conversations]

    masks = []
    versions = []
    for one in conversations:
        masks.append(np.array(one.mask, np.bool_) & (one.failure is None))
        versions.append(str(one.versions[-1]) if one.versions else "")
    columns: dict[str, Any] = {
        "response_ids": Jagged.from_rows(each("tokens"), np.int64),
        "response_mask": Jagged.from_rows(masks, np.bool_),
        "rollout_log_probs": Jagged.from_rows(each("log_probs"), np.float32),
        "response_versions": Jagged.from_rows(each("versions"), np.int64),
        "finish_reason": objects(each("finish_reason")),
        "weight_version": objects(versions),
        "answer_text": objects(list(map(_last_answer, conversations))),
        "messages": objects(each("messages")),
        "turns": np.array(each("answered"), np.int64),
        "tool_calls": np.array(each("calls"), np.int64),
        "agent_failure": objects(each("failure")),
    }
    if with_rewards:
        columns[TURN_REWARDS] = objects(each("rewards"))
    return DataProto.from_columns(columns)


def _last_answer(conversation: Conversation) -> str:
    for message in reversed(conversation.messages):
        if message["role"] == "assistant":
            return message["content"]
    return ""


def conversing(
    engines: Requests, tokenizer: Tokenizer, config: RunConfig, logs: Path | None = None
) -> Engines:
    """Wrap the engines in `Conversations` if `rollout.agent.loop` requires it. Takes the same
    arguments as `Conversations`.
    """
    if config.rollout.agent.loop == SINGLE_TURN:
        return engines
    return Conversations(engines, tokenizer, config, logs)
