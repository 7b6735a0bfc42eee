"""What a model's server does by itself: the sampling of a request, many requests at once, and clients
and engines that fail. `test_completions` has what it shares with conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from hybridflow.agents.conversation import Sampled
from hybridflow.agents.model_server import ModelServer
from hybridflow.config.schema import SamplingConfig, ValSamplingConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import EngineError
from tests.unit.agents.talks import FAMILIES, byte_tokenizer

QUESTION: list[Any] = [{"role": "user", "content": "What is 12 * 34?"}]
CONTEXT = 200


@pytest.fixture
def chatml(tmp_path: Path) -> Tokenizer:
    return byte_tokenizer(tmp_path, *FAMILIES["chatml"])


class Model:
    """Answers "1", "2", ... in the order of the requests, as soon as `go` is set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[tuple[str, int, SamplingConfig]] = []
        self.cancelled = 0
        self.error: Exception | None = None

    async def sample(self, tokens: Sequence[int], most: int, sampling: SamplingConfig) -> Sampled:
        self.asked.append((self.tokenizer.decode(tokens), most, sampling))
        text = str(len(self.asked))
        if self.error is not None:
            raise self.error
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = np.array([*self.tokenizer.encode(text), self.tokenizer.eos_id][:most])
        return Sampled(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int64), "stop")


@asynccontextmanager
async def served(model: Model, key: str = "the key") -> AsyncIterator[openai.AsyncOpenAI]:
    server = ModelServer(
        model.tokenizer,
        model.sample,
        model="m",
        key="the key",
        context=CONTEXT,
        defaults=ValSamplingConfig(temperature=0.5, top_p=0.9),
        call_format="hermes",
    )
    await server.open()
    try:
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key=key, timeout=30.0, max_retries=0
        ) as client:
            yield client
    finally:
        await server.close()


async def asked(client: openai.AsyncOpenAI, messages: Any = None, **more: Any) -> Any:
    done = await client.chat.completions.create(model="m", messages=messages or QUESTION, **more)
    return done.choices[0].message.content


def test_a_request_sets_its_sampling_and_the_rest_is_the_servers(chatml: Tokenizer) -> None:
    async def run() -> None:
        model = Model(chatml)
        async with served(model) as client:
            await asked(client)
            more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
            await asked(client, temperature=0, presence_penalty=1, seed=7, extra_body=more)
            assert [how for _, _, how in model.asked] == [
                ValSamplingConfig(temperature=0.5, top_p=0.9),
                ValSamplingConfig(
                    temperature=0.0,
                    top_p=0.9,
                    top_k=5,
                    min_p=0.1,
                    presence_penalty=1.0,
                    repetition_penalty=1.2,
                ),
            ]
            for name, value in (
                ("temperature", -1),
                ("temperature", "hot"),
                ("top_p", 0),
                ("top_k", 0),
                ("frequency_penalty", 3),
            ):
                with pytest.raises(openai.BadRequestError, match=name) as refused:
                    await asked(client, extra_body={name: value})
                assert refused.value.param == name

    asyncio.run(run())


def test_requests_are_independent_and_answered_at_the_same_time(chatml: Tokenizer) -> None:
    async def run() -> None:
        model = Model(chatml)
        model.go.clear()
        async with served(model) as client:
            asking = [asyncio.create_task(asked(client)) for _ in range(40)]
            while len(model.asked) < 40:
                await asyncio.sleep(0.01)
            model.go.set()
            assert sorted(await asyncio.gather(*asking), key=int) == [str(n + 1) for n in range(40)]
            # a client may rewrite what was said, and begin an answer
            talk = [*QUESTION, {"role": "assistant", "content": "Never said."}, *QUESTION]
            assert await asked(client, talk) == "41"
            assert await asked(client, talk[:2]) == "42"
            assert "Never said." in model.asked[-1][0]

    asyncio.run(run())


def test_an_answer_has_the_rest_of_the_context(chatml: Tokenizer) -> None:
    async def run() -> None:
        model = Model(chatml)
        async with served(model) as client:
            await asked(client)
            await asked(client, max_tokens=5)
            prompt = len(chatml.encode_chat(QUESTION))
            assert [most for _, most, _ in model.asked] == [CONTEXT - prompt, 5]
            with pytest.raises(
                openai.BadRequestError, match=r"the prompt has .* tokens"
            ) as refused:
                await asked(client, [{"role": "user", "content": "x" * CONTEXT}])
            assert refused.value.code == "context_length_exceeded" and len(model.asked) == 2

    asyncio.run(run())


def test_a_client_that_hangs_up_frees_its_engine(chatml: Tokenizer) -> None:
    async def run() -> None:
        model = Model(chatml)
        model.go.clear()
        async with served(model) as client:
            with pytest.raises(openai.APITimeoutError):
                await asked(client, timeout=0.3)
            async with asyncio.timeout(10):
                while not model.cancelled:
                    await asyncio.sleep(0.01)
            model.go.set()
            assert await asked(client) == "2"

    asyncio.run(run())


def test_an_engines_error_is_the_servers_and_not_its_end(chatml: Tokenizer) -> None:
    async def run() -> None:
        model = Model(chatml)
        model.error = EngineError("out of memory\nlog", engine="engine-0")
        async with served(model) as client:
            with pytest.raises(openai.InternalServerError, match="out of memory") as failed:
                await asked(client)
            assert failed.value.type == "server_error" and "log" not in str(failed.value)
            model.error = None
            assert await asked(client) == "2"

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("key", ["another", "the kez", "the keyy", "the ke"])
def test_another_key_opens_nothing(chatml: Tokenizer, key: str) -> None:
    async def run() -> None:
        model = Model(chatml)
        async with served(model, key) as client:
            with pytest.raises(openai.AuthenticationError, match="the API key is invalid"):
                await asked(client)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        assert model.asked == []

    asyncio.run(run())


def test_calls_in_the_history_reach_the_template_as_objects(tmp_path: Path) -> None:
    known, end, template = FAMILIES["chatml"]
    calls = (
        "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
        "[{{ c.function.arguments.a + 1 }}]{% endfor %}{% endfor %}"
    )
    chatml = byte_tokenizer(tmp_path, known, end, calls + template)

    def call(arguments: Any) -> list[Any]:
        function = {"name": "f", "arguments": arguments}
        made = {"id": "x", "type": "function", "function": function}
        return [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [made]}, *QUESTION]

    async def run() -> None:
        model = Model(chatml)
        async with served(model) as client:
            await asked(client, call('{"a": 41}'))
            assert model.asked[0][0].startswith("[42]")
            with pytest.raises(openai.BadRequestError, match="message 1: each tool call must have"):
                await asked(client, call("{"))

    asyncio.run(run())
