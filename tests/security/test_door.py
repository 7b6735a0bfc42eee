"""Programs that mean harm at the OpenAI endpoint get nothing of other conversations, and take
nothing from them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from hybridflow.agents.completions import CompletionServer
from hybridflow.agents.conversation import Conversation, Endpoint, Sampled
from hybridflow.agents.model_server import ModelServer
from hybridflow.config.schema import AgentConfig, SamplingConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.process.secret import without_credentials
from tests.security.door import QUESTION
from tests.unit.agents.talks import FAMILIES, byte_tokenizer

ROOT = Path(__file__).parents[2]
ROUNDS = 3  # of questions in a conversation
PLACES = 256 + 16 + 16  # of strangers, and of the two programs that mean harm


class Echo:
    """Answers with the number that the prompt asks about: whoever got another's answer would show
    it."""

    def __init__(self, tokenizer: Tokenizer, word: str) -> None:
        self.tokenizer = tokenizer
        self.word = word
        self.asked = 0

    async def sample(self, tokens: Any, most: int) -> Sampled:
        assert self.word in self.tokenizer.decode(list(tokens))
        self.asked += 1
        await asyncio.sleep(0.05)
        ids = np.array([*self.tokenizer.encode(f"{self.word} {self.asked}"), self.tokenizer.eos_id])
        return Sampled(
            ids, -np.arange(1.0, len(ids) + 1, dtype=np.float32), np.full(len(ids), 7), "stop"
        )


def conversation(
    tokenizer: Tokenizer, server: CompletionServer, question: str
) -> tuple[Conversation, Echo]:
    engine = Echo(tokenizer, question.split()[2])
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    held = Conversation(
        prompt, {}, AgentConfig(loop="tools", max_answers=ROUNDS), tokenizer, engine.sample, 1000
    )
    held.endpoint = server.endpoint
    return held, engine


async def honest(
    tokenizer: Tokenizer, server: CompletionServer, number: int, over: asyncio.Event
) -> int:
    """Talk, conversation after conversation, until the attempts are over; how many there were."""
    count = 0
    while count == 0 or not over.is_set():
        word = f"{number}-{count}-{secrets.token_hex(4)}"
        held, engine = conversation(tokenizer, server, f"What is {word} ?")
        messages: list[Any] = [{"role": "user", "content": f"What is {word} ?"}]
        async with (
            held.serve() as at,
            openai.AsyncOpenAI(
                base_url=at.base_url, api_key=at.api_key, timeout=120.0, max_retries=0
            ) as client,
        ):
            for place in range(1, ROUNDS + 1):
                done = await client.chat.completions.create(model="any", messages=messages)
                answer = done.choices[0].message.content
                assert answer == f"{word} {place}"
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": f"And {word}?"},
                ]
        assert engine.asked == ROUNDS == held.answered
        count += 1
    return count


async def intruder(
    at: Endpoint, key: str, number: int, other: dict[str, Any]
) -> list[tuple[str, str]]:
    """What the attempts of `tests.security.door` got."""
    address = at.base_url.removeprefix("http://").removesuffix("/v1")
    words = ["-m", "tests.security.door", address, key, str(number), json.dumps(other)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=ROOT,
        env=without_credentials(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 500)
    assert process.returncode == 0, err.decode()[-3000:]
    return [(name, got) for name, got in json.loads(out)]


def memory() -> int:
    """MiB that this process has in use at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("talks", "connections"),
    [pytest.param(8, 400, id="few"), pytest.param(100, 1000, id="many", marks=pytest.mark.full)],
)
def test_no_client_of_the_endpoint_harms_a_conversation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, talks: int, connections: int
) -> None:
    """A stranger, and the program of a conversation, try everything at once, while others talk."""
    tokenizer = byte_tokenizer(tmp_path, *FAMILIES["chatml"])
    before = memory()
    most_open = 0

    async def run() -> tuple[list[int], list[tuple[str, str]], list[tuple[str, str]]]:
        server = CompletionServer()
        over = asyncio.Event()
        start = len(os.listdir("/proc/self/fd"))

        async def watch() -> None:
            nonlocal most_open
            while True:
                most_open = max(most_open, len(os.listdir("/proc/self/fd")) - start)
                await asyncio.sleep(0.05)

        held, _ = conversation(tokenizer, server, str(QUESTION[0]["content"]))
        theirs, _ = conversation(tokenizer, server, "What is theirs ?")
        async with theirs.serve() as victim, held.serve() as at:
            watching = asyncio.create_task(watch())
            talking = [
                asyncio.create_task(honest(tokenizer, server, number, over))
                for number in range(talks)
            ]
            known = {
                "key": victim.api_key[:-4],
                "messages": [{"role": "user", "content": "What is theirs ?"}],
            }
            strange, harmful = await asyncio.gather(
                intruder(at, "", connections, known), intruder(at, at.api_key, connections, known)
            )
            over.set()
            counts = await asyncio.gather(*talking)
            watching.cancel()
            assert theirs.answered == 0
        await server.close()
        return counts, strange, harmful

    counts, strange, harmful = asyncio.run(run())
    tried = f"{len(strange)} + {len(harmful)} attempts beside {sum(counts)} conversations"
    print(f"{tried}: {most_open} connections at most, {memory() - before} MiB")
    assert len(counts) == talks
    assert {name: what for name, what in strange if what} == {}
    assert {name: what for name, what in harmful if what} == {}
    assert len(strange) >= 70
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == []
    assert most_open <= PLACES + 4 * talks + 16  # two ends of each honest connection
    assert memory() - before < 400


@pytest.mark.slow
@pytest.mark.full
def test_no_stranger_harms_a_models_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger tries everything at once, while others hold the key and talk."""
    tokenizer = byte_tokenizer(tmp_path, *FAMILIES["chatml"])
    before = memory()

    async def echo(tokens: Any, most: int, sampling: SamplingConfig) -> Sampled:
        await asyncio.sleep(0.05)
        asked = tokenizer.decode(list(tokens)).split("What is ")[1].split()[0]
        ids = np.array([*tokenizer.encode(asked), tokenizer.eos_id])
        return Sampled(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int64), "stop")

    async def talk(at: Endpoint, over: asyncio.Event) -> int:
        count = 0
        async with openai.AsyncOpenAI(
            base_url=at.base_url, api_key=at.api_key, timeout=120.0, max_retries=0
        ) as client:
            while count == 0 or not over.is_set():
                word = secrets.token_hex(4)
                messages: list[Any] = [{"role": "user", "content": f"What is {word} ?"}]
                done = await client.chat.completions.create(model="m", messages=messages)
                assert done.choices[0].message.content == word
                count += 1
        return count

    async def run() -> tuple[list[int], list[tuple[str, str]]]:
        key = secrets.token_urlsafe(32)
        server = ModelServer(
            tokenizer,
            echo,
            model="m",
            key=key,
            context=1000,
            defaults=SamplingConfig(),
            call_format="hermes",
        )
        await server.open()
        over = asyncio.Event()
        at = Endpoint(server.base_url, key)
        talking = [asyncio.create_task(talk(at, over)) for _ in range(8)]
        strange = await intruder(at, "", 400, {"key": key[:-4], "messages": QUESTION})
        over.set()
        counts = await asyncio.gather(*talking)
        await server.close()
        return counts, strange

    counts, strange = asyncio.run(run())
    print(f"{len(strange)} attempts beside {sum(counts)} answers: {memory() - before} MiB")
    assert {name: what for name, what in strange if what} == {}
    assert len(strange) >= 70
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == []
    assert memory() - before < 400
