"""Measures the driver's work for 10,000 concurrent conversations with four responses each.

Conversations, requests and their placement are the same as in a run. The engines are plain lists
and respond immediately.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import Timed, loops
from hybridflow.config.schema import AgentConfig, DataConfig, RolloutConfig, RunConfig
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.rollout.conversations import Conversations
from hybridflow.rollout.requests import Requests
from hybridflow.single_controller import block_on
from hybridflow.workers.rollout import response_columns

ANSWERS = 4
ENGINES = 8
PROMPT = 64  # tokens
TOKENS = 32  # per response
RUNNING = 4096  # concurrent requests per engine
MOST_GIB = 4.0
_AT_ONCE = 256  # responses that an engine returns at a time
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
    """Engines that respond to every request with the same tokens."""

    def __init__(self, config: RunConfig, eos: int) -> None:
        super().__init__(config)
        self.queues = [deque[int]() for _ in range(ENGINES)]
        span = WeightSpan("3", 0, TOKENS)
        tokens = [5] * (TOKENS - 1) + [eos]
        self.said = Completion(tokens, [-0.5] * TOKENS, "stop", (span,))

    def _serving(self) -> Sequence[int]:
        return range(ENGINES)

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for number, part in parts.items():
            self.queues[number].extend(part["ticket"].tolist())

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        found = []
        for queue in [self.queues[number] for number in engines]:
            tickets = [queue.popleft() for _ in range(min(_AT_ONCE, len(queue)))]
            columns = response_columns([self.said] * len(tickets))
            found.append(columns.with_columns(ticket=np.array(tickets, np.int64)))
        return found

    def _unexpected(self, *_: object) -> Any:
        raise RuntimeError(
            "these engines do not support loss, saving, aborting or weight syncs"
        )

    sync = _unexpected
    sleep = _unexpected
    wake = _unexpected
    _so_far = _unexpected
    _leave_out_lost = _unexpected
    _abort = _unexpected
    _forget = _unexpected


@measurement("conversations", timeout_s=900, rounds=5, warm_up=0)
def conversations(place: Place, count: int = 10_000) -> Yields:
    """the driver's requests per second and memory for 10,000 conversations, using engines that
    respond immediately"""
    write_character_tokenizer(place.local, "0123456789")
    (place.local / "loop.py").write_text(LOOP)
    config = RunConfig(
        data=DataConfig(max_response_length=512),
        rollout=RolloutConfig(
            num_engines=ENGINES,
            max_running_requests=RUNNING,
            agent=AgentConfig(loop=f"{place.local}/loop.py:several"),
        ),
    )
    tokenizer = load_tokenizer(str(place.local))
    prompts = _prompts(count)

    async def answers() -> DataProto:
        rollouts = Conversations(Engines(config, tokenizer.eos_id), tokenizer, config)
        return await rollouts.answers(rollouts.begin(prompts, training=True))

    def converse() -> None:
        found = block_on(answers())
        assert set(found["turns"].tolist()) == {ANSWERS}

    yield Timed(
        {"conversations/requests": converse},
        yardstick=loops(20),
        amount=count * ANSWERS,
        unit="requests/s",
        bound=0.1,
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield measured(
        "conversations/resident memory",
        "GiB",
        memory,
        "lower",
        limit=("aim", MOST_GIB),
    )


def _prompts(count: int) -> DataProto:
    """Return prompts that consist of digits, with eight samples each."""
    texts = objects(["x"] * count)
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows([np.arange(PROMPT) % 10] * count, np.int64),
            "data_source": texts,
            "ground_truth": texts,
            "extra_info": objects([{} for _ in range(count)]),
            "uid": np.arange(count) // 8,
        }
    )
