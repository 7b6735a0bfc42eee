"""A conversation, stored as the tokens that the engine processed: sampled tokens interleaved with
observations.

Tokens are only appended, never re-tokenized from text: the chat template renders only the text
between one answer and the next (`Tokenizer.continuation`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridflow.agents.episodes import Episode, Episodes
from hybridflow.agents.formats.base import Call
from hybridflow.batch import Supports
from hybridflow.config.schema import AgentConfig
from hybridflow.data.chat_template import Exchange, ShownCall
from hybridflow.data.plain_text import whole_text
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Sampled:
    """The result of one sampling request that returned t tokens: token_ids, log_probs and weight
    versions, all `[t]`, and a `finish_reason` (stop, length or abort). With router replay, `routes`
    contains the experts selected for the request's tokens (`asked` of them) and for the sampled
    tokens, `[asked + t, layers, experts per token]`. The last token's experts are unknown. If the
    sampler truncates the distribution, `support` contains the candidates from which each token was
    sampled.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    routes: np.ndarray | None = None
    support: Supports | None = None


# (all tokens so far, maximum tokens to sample) -> the sampled tokens
Sample = Callable[[Sequence[int], int], Awaitable[Sampled]]


class ConversationOver(Exception):
    """Raised when the conversation has reached its maximum length or number of answers. Ends an
    agent loop that does not catch it.
    """


@dataclass(frozen=True)
class Endpoint:
    """Connection settings with which an OpenAI client accesses a conversation: OPENAI_BASE_URL and
    OPENAI_API_KEY."""

    base_url: str
    api_key: str


@dataclass
class Conversation:
    """A conversation controlled by an agent loop.

    Attributes:
        prompt: token ids of the prompt.
        row: data_source, ground_truth and extra_info from the prompt's dataset row.
        config: `rollout.agent`.
        room: number of tokens, sampled or observed, that can still be added.
        messages: the answers and observations so far, as chat messages.
        shown: the same messages as exchanges, which is the chat template's input.
        end: why the conversation ended; empty while it is running.
        failure: the error, if the loop raised one; the conversation's tokens are then not trained
            on.
        episodes: starts episodes of `rollout.agent.environment`; None if it is not set.
        endpoint: serves the conversation to OpenAI clients.
        rewards: rewards assigned by the loop.
        answered: number of answers so far.
        calls: number of tool calls so far.
        routes: known expert selections, for the leading tokens of the prompt and conversation; None
            if not requested.
        supports: candidates from which each token was sampled, for parts of `tokens`.
    """

    prompt: Sequence[int]
    row: Mapping[str, Any]
    config: AgentConfig
    tokenizer: Tokenizer
    sample: Sample
    room: int
    messages: list[dict[str, str]] = field(default_factory=list)
    shown: list[Exchange] = field(default_factory=list)
    end: str = ""
    failure: str | None = None
    answered: int = 0
    calls: int = 0
    episodes: Episodes | None = None
    endpoint: Callable[[Conversation], AbstractAsyncContextManager[Endpoint]] | None = None
    rewards: list[float] = field(default_factory=list)
    finish_reason: str = "abort"  # before the first answer
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    supports: list[Supports] = field(default_factory=list)

    async def answer(self, most: int | None = None, stop: Sequence[str] = ()) -> str:
        """Sample the policy's next answer. Returns its text without the stop token.

        Args:
            most: maximum number of tokens in this answer; None means as many as still fit.
            stop: stop strings. The answer ends with the token that completes one of them.

        Raises:
            ConversationOver: the conversation already has `rollout.agent.max_answers` answers, or
                has no room for another token.
        """
        if self.answered == self.config.max_answers:
            raise ConversationOver(f"it reached rollout.agent.max_answers={self.answered}")
        self.need(1)
        asked = [*self.prompt, *self.tokens]
        answer = await self.sample(asked, min(self.room, most or self.room))
        sampled, text = self._until(stop, answer, len(asked))
        self._append(sampled.token_ids, True, sampled.log_probs, sampled.versions, sampled.support)
        # each token keeps the experts recorded by the request in which it was sampled or shown
        if sampled.routes is not None:
            known = sampled.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([known, sampled.routes[len(known) : -1]])
        self.answered += 1
        self.finish_reason = sampled.finish_reason
        self.messages.append({"role": "assistant", "content": text})
        return text

    def observe(self, texts: Sequence[str], calls: Sequence[Call] = ()) -> None:
        """Show texts to the policy before its next answer.

        Each becomes a message with the role `rollout.agent.observation_role`, truncated to
        `max_observation_tokens`.

        Args:
            calls: the last answer's calls that produced these texts, for templates that render call
                names or ids.

        Raises:
            ConversationOver: the last answer was cut off, or there is no room for both the texts
                and another answer.
            DataError: the chat template cannot render the texts after the answer.
        """
        role = self.config.observation_role
        made = []
        for number, one in enumerate(calls):
            made.append(ShownCall(one.name, one.id or self.call_id(number)))
        messages = [{"role": role, "content": text} for text in texts]
        if role == "tool":
            for message, call in zip(messages, made, strict=False):
                message |= {"tool_call_id": call.id, "name": call.name}
        self.show(messages, made)

    def show(self, messages: Sequence[Mapping[str, str]], calls: Sequence[ShownCall] = ()) -> None:
        """Show messages of any role to the policy, like `observe`.

        Args:
            messages: messages with role and content; tool results also require `tool_call_id` and
                `name`.
            calls: the calls in the last answer.
        """
        if self.finish_reason != "stop":
            raise ConversationOver("the answer was cut off")
        # each message takes at least one token: do not render a million of them first
        self.need(len(messages) + 1)
        most = self.config.max_observation_tokens
        exchange = Exchange(
            [{**one, "content": self.tokenizer.cut(one["content"], most)} for one in messages],
            calls,
        )
        ids = self.tokenizer.continuation(
            [*self.shown, exchange], self.tokens[-1] if self.tokens else None
        )
        self.need(len(ids) + 1)
        self.shown.append(exchange)
        version = self.versions[-1] if self.versions else -1
        count = len(ids)
        self._append(
            np.array(ids, np.int64),
            False,
            np.zeros(count, np.float32),
            np.full(count, version, np.int64),
        )
        self.messages += [
            {"role": one["role"], "content": whole_text(one["content"])} for one in messages
        ]

    def call_id(self, number: int) -> str:
        """Return an id for a call in the last answer.

        It has nine alphanumeric characters, as some templates require, and is the same when the
        conversation is replayed.
        """
        return f"c{self.answered:04d}{number:04d}"

    def episode(self) -> Episode:
        """Create an episode of `rollout.agent.environment` for this row. Enter it with `async
        with`.

        Raises:
            ConfigError: `rollout.agent.environment` is not set.
        """
        if self.episodes is None:
            raise ConfigError("the agent loop requires an episode: set rollout.agent.environment")
        return self.episodes.begin(self.row)

    def serve(self) -> AbstractAsyncContextManager[Endpoint]:
        """Create an endpoint for OpenAI's chat completions API. Enter it with `async with`; the
        client's requests then become the answers and observations of this conversation.

        Raises:
            ConversationOver: the conversation ended; raised at the end of the block.
        """
        assert self.endpoint is not None
        return self.endpoint(self)

    def reward(self, value: float) -> None:
        """Add a reward for the last answer to the conversation's score. Requires a loop registered
        with `gives_rewards=True`."""
        self.rewards.append(float(value))

    def need(self, tokens: int) -> None:
        """Check that there is room for this many tokens. Otherwise, mark the conversation as cut
        off and raise ConversationOver.
        """
        if tokens > self.room:
            self.finish_reason = "length"
            raise ConversationOver("the conversation has no room for more tokens")

    def _until(self, stop: Sequence[str], sampled: Sampled, asked: int) -> tuple[Sampled, str]:
        """Truncate the sampled tokens at the first stop string. Returns the tokens, and the text
        before the stop string."""
        ids = sampled.token_ids.tolist()
        text = self.tokenizer.decode(ids)
        places = [text.find(one) for one in stop if one in text]
        if not places:
            return sampled, text
        begin = min(places)
        length = bisect_left(
            range(len(ids)),
            True,
            key=lambda count: any(one in self.tokenizer.decode(ids[:count]) for one in stop),
        )
        kept = dataclasses.replace(
            sampled,
            token_ids=sampled.token_ids[:length],
            log_probs=sampled.log_probs[:length],
            versions=sampled.versions[:length],
            finish_reason="stop",
            routes=None if sampled.routes is None else sampled.routes[: asked + length],
            support=None if sampled.support is None else sampled.support.take(slice(length)),
        )
        return kept, text[:begin]

    def _append(
        self,
        ids: np.ndarray,
        sampled: bool,
        log_probs: np.ndarray,
        versions: np.ndarray,
        support: Supports | None = None,
    ) -> None:
        self.supports.append(support or Supports.unknown(len(ids)))
        self.tokens += ids.tolist()
        self.mask += [sampled] * len(ids)
        self.log_probs += log_probs.tolist()
        self.versions += versions.tolist()
        self.room -= len(ids)
