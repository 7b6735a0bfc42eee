"""One conversation as the tokens that the engine saw: what the policy sampled, and between it what
it was shown.

Tokens are appended and never made again from text: a chat template is asked only for what it puts
between an answer and the next one (`Tokenizer.continuation`).
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
    """What the engine sampled: token_ids, log_probs and weight versions `[t]`, and why it ended
    (stop, length, abort); where they are replayed, the experts of all tokens that it was asked with
    and of these `[asked + t, layers, experts a token]`, those of the last one not known; and where
    the sampler cuts its distribution, what each token was sampled among."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    routes: np.ndarray | None = None
    support: Supports | None = None


# (all tokens so far, the most tokens to sample) -> what the engine sampled
Sample = Callable[[Sequence[int], int], Awaitable[Sampled]]


class ConversationOver(Exception):
    """The conversation has no room for another token, or has had its answers. Ends the agent loop
    that does not catch it."""


@dataclass(frozen=True)
class Endpoint:
    """Where a client of OpenAI's interface finds a conversation: OPENAI_BASE_URL and
    OPENAI_API_KEY."""

    base_url: str
    api_key: str


@dataclass
class Conversation:
    """What an agent loop is given.

    Attributes:
        prompt: token ids of the prompt.
        row: data_source, ground_truth and extra_info of the prompt's row.
        config: `rollout.agent`.
        room: tokens that may still follow the prompt, sampled or shown.
        messages: the answers and observations so far, as chat messages.
        shown: the same as exchanges of the chat template.
        end: why it ended; empty while it goes on.
        failure: what went wrong, where the loop raised. Its tokens are not trained on.
        episodes: begin an episode of `rollout.agent.environment`; None without one.
        endpoint: how a conversation is served to programs that speak OpenAI's interface.
        rewards: what the loop has given.
        answered, calls: number of answers, and of tools called.
        routes: experts of the first tokens of prompt and conversation, as far as they are known;
            None: not asked for.
        supports: what the `tokens` were sampled among, in parts.
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
    finish_reason: str = "abort"  # until something was sampled
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    supports: list[Supports] = field(default_factory=list)

    async def answer(self, most: int | None = None, stop: Sequence[str] = ()) -> str:
        """Let the policy go on; the text of what it sampled, without the token that ended it.

        Args:
            most: tokens of this answer; None: as many as there is room for.
            stop: texts before which the answer ends. The token that completes one is its last: what
                was sampled after it is dropped.

        Raises:
            ConversationOver: it has had `rollout.agent.max_answers` answers, or there is no room
                for another token.
        """
        if self.answered == self.config.max_answers:
            raise ConversationOver(f"{self.answered} answers")
        self.need(1)
        asked = [*self.prompt, *self.tokens]
        sampled, text = self._until(
            stop, await self.sample(asked, min(self.room, most or self.room)), len(asked)
        )
        self._append(sampled.token_ids, True, sampled.log_probs, sampled.versions, sampled.support)
        # each token keeps those of the request in which it was sampled or shown
        if sampled.routes is not None:
            known = sampled.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([known, sampled.routes[len(known) : -1]])
        self.answered += 1
        self.finish_reason = sampled.finish_reason
        self.messages.append({"role": "assistant", "content": text})
        return text

    def observe(self, texts: Sequence[str], calls: Sequence[Call] = ()) -> None:
        """Show the policy these texts, each as a message of `rollout.agent.observation_role` and
        cut to `max_observation_tokens`. It is asked next.

        Args:
            calls: those of the last answer whose results the texts are, for templates that show
                names or ids of them.

        Raises:
            ConversationOver: the last answer did not end by itself, or there is no room for the
                texts and an answer.
            DataError: the chat template cannot show the texts after the answer.
        """
        role = self.config.observation_role
        made = [
            ShownCall(one.name, one.id or self.call_id(number)) for number, one in enumerate(calls)
        ]
        known = (
            [{"tool_call_id": one.id, "name": one.name} for one in made] if role == "tool" else []
        )
        named = [*known, *({} for _ in texts)]
        self.show(
            [{"role": role, "content": text, **named[place]} for place, text in enumerate(texts)],
            made,
        )

    def show(self, messages: Sequence[Mapping[str, str]], calls: Sequence[ShownCall] = ()) -> None:
        """Show the policy messages of any role, as `observe` does.

        Args:
            messages: role and content, and of a result `tool_call_id` and `name`.
            calls: those of the last answer.
        """
        if self.finish_reason != "stop":
            raise ConversationOver("the answer was cut off")
        # each takes a token at least: a million of them are not rendered first
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
        """An id for a call of the last answer: nine letters and digits, as some templates want, and
        the same when the conversation is held again."""
        return f"c{self.answered:04d}{number:04d}"

    def episode(self) -> Episode:
        """An episode of `rollout.agent.environment` for this row, to be entered with `async with`.

        Raises:
            ConfigError: `rollout.agent.environment` is not set.
        """
        if self.episodes is None:
            raise ConfigError("the agent loop asks for an episode: set rollout.agent.environment")
        return self.episodes.begin(self.row)

    def serve(self) -> AbstractAsyncContextManager[Endpoint]:
        """An endpoint of OpenAI's chat completions, to be entered with `async with`: the requests
        of a client become the answers and observations of this conversation.

        Raises:
            ConversationOver: (at the end of the block) the conversation came to its end.
        """
        assert self.endpoint is not None
        return self.endpoint(self)

    def reward(self, value: float) -> None:
        """Add to the score of the conversation, for the last answer. The loop is registered with
        `gives_rewards=True`."""
        self.rewards.append(float(value))

    def need(self, tokens: int) -> None:
        """Raise ConversationOver where there is no room for so many tokens; the conversation is
        then cut off."""
        if tokens > self.room:
            self.finish_reason = "length"
            raise ConversationOver("no room is left")

    def _until(self, stop: Sequence[str], sampled: Sampled, asked: int) -> tuple[Sampled, str]:
        """What was sampled up to the first text of `stop`, and the text before it."""
        ids = sampled.token_ids.tolist()
        text = self.tokenizer.decode(ids)
        begin = min((place for one in stop if (place := text.find(one)) >= 0), default=None)
        if begin is None:
            return sampled, text
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
