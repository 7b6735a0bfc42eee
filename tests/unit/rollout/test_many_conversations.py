"""Two thousand conversations at the same time: what they cost in messages, and what else can go on
in the loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import AgentConfig, DataConfig, RolloutConfig, RunConfig
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.rollout.conversations import Conversations
from hybridflow.rollout.protocols import Sample
from hybridflow.rollout.requests import Requests
from hybridflow.single_controller import block_on
from hybridflow.workers.rollout import response_columns

pytestmark = pytest.mark.slow  # four thousand requests, twice

MANY = 2000
ENGINES = 4
PROMPT = 500
TOKENS = 32
ANSWERS = 2
MOST_S = 0.02
LOOP = f"""
from hybridflow.agents.loops.base import agent_loop

@agent_loop("several")
async def several(conversation, tools):
    for _ in range({ANSWERS - 1}):
        await conversation.answer()
        conversation.observe(["12"])
    await conversation.answer()
"""


class Engines(Requests):
    """Engines that have answered whatever they were asked as soon as they are looked at."""

    def __init__(self, config: RunConfig, eos: int) -> None:
        super().__init__(config)
        self.messages = {"ask": 0, "collect": 0}
        self.held: list[list[int]] = [[] for _ in range(ENGINES)]
        said = Completion(
            [5] * (TOKENS - 1) + [eos], [-0.5] * TOKENS, "stop", (WeightSpan("3", 0, TOKENS),)
        )
        self.said = response_columns([said] * MANY)

    def _serving(self) -> Sequence[int]:
        return range(ENGINES)

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        self.messages["ask"] += 1
        for number, part in parts.items():
            self.held[number] += part["ticket"].tolist()
        await asyncio.sleep(0)

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        self.messages["collect"] += 1
        found = []
        for number in engines:
            # what workers do, and the fetch of their answers, is not the loop's work
            await asyncio.sleep(0)
            tickets, self.held[number] = self.held[number], []
            found.append(
                self.said.rows(np.arange(len(tickets))).with_columns(
                    ticket=np.array(tickets, np.int64)
                )
            )
        await asyncio.sleep(0)
        return found

    async def _unused(self, *_: object) -> None:
        raise RuntimeError("these engines are never lost, and have nothing to give up")

    _so_far = _leave_out_lost = _abort = _forget = sync = sleep = wake = _unused  # type: ignore[assignment]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(folder, "0123456789")
    (folder / "loop.py").write_text(LOOP)
    return load_tokenizer(folder)


def service_of(tokenizer: Tokenizer, folder: Path) -> tuple[Engines, Conversations]:
    (folder / "loop.py").write_text(LOOP)
    config = RunConfig(
        data=DataConfig(max_response_length=512),
        rollout=RolloutConfig(
            num_engines=ENGINES,
            max_running_requests=MANY,
            agent=AgentConfig(loop=f"{folder}/loop.py:several"),
        ),
    )
    engines = Engines(config, tokenizer.eos_id)
    return engines, Conversations(engines, tokenizer, config)


def prompts(count: int) -> DataProto:
    return DataProto.from_columns(
        {"prompt_ids": Jagged.from_rows([np.arange(PROMPT) % 10] * count, np.int64)}
    )


def moved_on(
    tokenizer: Tokenizer, folder: Path, count: int
) -> tuple[dict[str, int], list[tuple[float, str]]]:
    """The messages of so many conversations, and the seconds of CPU for which each callback held
    the loop.

    The loop is looked at as `slow_callback_duration` does it, though not by the clock on the wall:
    the machine has other work. Collections of garbage are left out: they belong to the process, and
    fall on whoever allocates next.
    """
    engines, service = service_of(tokenizer, folder)
    held: list[tuple[float, str]] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        held.append((time.thread_time() - start, repr(handle)))

    async def begin() -> Sequence[Sample]:
        return service.begin(prompts(count), training=True)

    samples = block_on(begin())
    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(asyncio.Handle, "_run", timed)
            found = block_on(service.answers(samples))
    finally:
        gc.enable()
    assert found["turns"].tolist() == [ANSWERS] * count and engines.is_idle
    return engines.messages, held


def test_the_number_of_messages_does_not_follow_the_number_of_conversations(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    few, many = (moved_on(tokenizer, tmp_path, count)[0] for count in (20, MANY))
    assert few == many == {"ask": ANSWERS, "collect": ANSWERS}


@pytest.mark.full  # the seconds of a processor, which CI's may lack
def test_no_callback_holds_the_loop_while_conversations_move_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A callback counts that is slow in each of three attempts: other jobs take the caches from
    this one."""
    for _ in range(3):
        slow = [one for one in moved_on(tokenizer, tmp_path, MANY)[1] if one[0] > MOST_S]
        if not slow:
            break
    assert slow == []
