"""A server for a model with OpenAI's chat completions API. It keeps no history: each request is a
separate conversation that ends with its answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hybridflow.agents.callers import Callers
from hybridflow.agents.completion_answer import next_answer
from hybridflow.agents.completion_request import ChatRequest, RequestError, read_request
from hybridflow.agents.conversation import Conversation, ConversationOver, Sampled
from hybridflow.agents.http_door import Door
from hybridflow.config.build import build_options
from hybridflow.config.keys import out_of_range
from hybridflow.config.schema import AgentConfig, SamplingConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError, HybridFlowError

# (tokens so far, maximum tokens to sample, how) -> the sampled tokens
SampleAs = Callable[[Sequence[int], int, SamplingConfig], Awaitable[Sampled]]
_MOST_CONNECTIONS = 1024
_MOST_BODIES = 16  # in memory at the same time
_LETTERS = string.ascii_letters + string.digits
_CALL_LETTERS = 9  # as many as some templates require


class ModelServer(Door):
    """Serves one model to clients that send the right API key.

    Args:
        sample: samples an answer.
        model: the model's name for clients.
        key: the API key.
        context: maximum number of tokens in a prompt and its answer together.
        defaults: sampling settings that a request may override.
        call_format: format of tool calls in answers (`rollout.agent.call_format`).
    """

    _ends_with_connection = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: SampleAs,
        *,
        model: str,
        key: str,
        context: int,
        defaults: SamplingConfig,
        call_format: str,
    ) -> None:
        super().__init__(model, Callers(_MOST_CONNECTIONS))
        self.reading = asyncio.Semaphore(_MOST_BODIES)
        self._tokenizer = tokenizer
        self._sample = sample
        self._key = key
        self._context = context
        self._defaults = defaults
        self._agent = AgentConfig(loop="tools", call_format=call_format)

    def _holder(self, key: str) -> ModelServer:
        given = key.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._key.encode()):
            raise RequestError("the API key is invalid; send the one printed at startup", 401)
        return self

    def _read(self, body: Any) -> ChatRequest:
        return read_request(body, own_sampling=True)

    async def _completion(self, holder: Any, asked: ChatRequest) -> dict[str, Any]:
        sampling = self._sampling(asked.sampling)
        # long prompts would block the other requests
        prompt = await asyncio.to_thread(self._prompt, asked)
        room = self._context - len(prompt)
        if room < 1:
            raise ConversationOver(
                f"the prompt has {len(prompt)} tokens, but the context length is {self._context}"
            )

        async def sample(tokens: Sequence[int], most: int) -> Sampled:
            return await self._sample(tokens, most, sampling)

        conversation = Conversation(prompt, {}, self._agent, self._tokenizer, sample, room)
        try:
            return await next_answer(conversation, asked, self.model, _call_id)
        except DataError:
            raise
        except HybridFlowError as error:
            raise RequestError(str(error).splitlines()[0], 500) from error

    def _sampling(self, given: Mapping[str, Any]) -> SamplingConfig:
        """Return the sampling settings of a request.

        Raises:
            RequestError: a field has a wrong type or is out of range.
        """
        try:
            found: SamplingConfig = build_options(self._defaults, given, "")
        except ConfigError as error:
            named = next((name for name in given if name in str(error)), None)
            raise RequestError(str(error), param=named) from error
        for line in out_of_range(found):
            raise RequestError(line, param=line.partition("=")[0])
        if found.top_k == 0:
            raise RequestError("top_k must be -1 (all tokens) or at least 1", param="top_k")
        return found

    def _prompt(self, asked: ChatRequest) -> list[int]:
        """Render the messages to tokens. If the chat template has no `developer` role, `system` is
        used instead.
        """
        messages = [_with_objects(number, one) for number, one in enumerate(asked.messages)]
        encode = partial(self._tokenizer.encode_chat, tools=asked.tools or None)
        try:
            return encode(messages)
        except DataError:
            if not any(one["role"] == "developer" for one in messages):
                raise
        for one in messages:
            if one["role"] == "developer":
                one["role"] = "system"
        return encode(messages)


def _with_objects(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have objects as arguments, as chat templates expect."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        try:
            arguments = function["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append({**call, "function": {**function, "arguments": arguments}})
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise RequestError(
                f"message {number}: each tool call must have function.name, and function.arguments "
                "as a JSON object",
                param="messages",
            ) from error
    return {**message, "tool_calls": calls}


def _call_id(number: int) -> str:
    """Return a new id for a tool call."""
    del number
    return "".join(secrets.choice(_LETTERS) for _ in range(_CALL_LETTERS))
