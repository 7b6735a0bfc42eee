"""Ten thousand conversations of four answers each, all under way at once, over engines that answer at once: how many
requests a second the driver's part takes, and its memory.

Conversations, requests and their placement are the ones of a run; the engines are lists. What engines and their workers
do with requests is `rollout_client`'s to measure.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import AgentConfig, DataConfig, RolloutConfig, RunConfig
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.rollout.conversations import Conversations
from hybridflow.rollout.protocols import answers
from hybridflow.rollout.requests import Requests
from hybridflow.workers.rollout import response_columns
from support.report import Figure, median, write

CONVERSATIONS, ANSWERS, ENGINES, ROUNDS = 10_000, 4, 8, 5
PROMPT, TOKENS = 64, 32  # tokens of a prompt, and of an answer
RUNNING = 4096  # requests that an engine runs at a time
_AT_ONCE = 256  # answers that an engine has ready at a look
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
    """Engines that answer every request with the same tokens when they are looked at."""

    def __init__(self, config: RunConfig, eos: int) -> None:
        super().__init__(config)
        self.asked = 0
        self.queues = [deque[int]() for _ in range(ENGINES)]
        self.answer = Completion([5] * (TOKENS - 1) + [eos], [-0.5] * TOKENS, "stop", (WeightSpan("3", 0, TOKENS),))

    def _serving(self) -> Sequence[int]:
        return range(ENGINES)

    def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for number, part in parts.items():
            tickets = part["ticket"].tolist()
            self.queues[number].extend(tickets)
            self.asked += len(tickets)

    def _collect(self, training: bool, engines: Sequence[int], wait_s: float) -> Sequence[DataProto]:
        return [self._answers(self.queues[number]) for number in engines]

    def _answers(self, queue: deque[int]) -> DataProto:
        tickets = [queue.popleft() for _ in range(min(_AT_ONCE, len(queue)))]
        return response_columns([self.answer] * len(tickets)).with_columns(ticket=np.array(tickets, np.int64))

    def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        raise RuntimeError("nothing is saved")

    def _leave_out_lost(self, answers: int) -> None:
        raise RuntimeError("these engines are never lost")

    def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        raise RuntimeError("nothing is aborted")

    def _forget(self, engines: Sequence[int]) -> None:
        raise RuntimeError("nothing is given up")


def prompts() -> DataProto:
    """Prompts of digits, eight samples of each."""
    objects = {name: np.array(["x"] * CONVERSATIONS, dtype=object) for name in ("data_source", "ground_truth")}
    rows: list[Any] = [{} for _ in range(CONVERSATIONS)]
    columns = {"extra_info": np.array(rows, dtype=object), "uid": np.arange(CONVERSATIONS) // 8}
    ids = Jagged.from_rows([np.arange(PROMPT) % 10] * CONVERSATIONS, np.int64)
    return DataProto.from_columns({"prompt_ids": ids, **objects, **columns})


def once(config: RunConfig, tokenizer: Tokenizer) -> float:
    """Requests a second."""
    engines = Engines(config, tokenizer.eos_id)
    service, given = Conversations(engines, tokenizer, config), prompts()
    start = time.perf_counter()
    found = answers(service, given, training=True)
    seconds = time.perf_counter() - start
    assert engines.asked == CONVERSATIONS * ANSWERS and set(found["turns"].tolist()) == {ANSWERS}
    return engines.asked / seconds


def main() -> None:
    """Measure, and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        write_character_tokenizer(Path(folder), "0123456789")
        (Path(folder) / "loop.py").write_text(LOOP)
        config = RunConfig(
            data=DataConfig(max_response_length=512),
            rollout=RolloutConfig(
                num_engines=ENGINES,
                max_running_requests=RUNNING,
                agent=AgentConfig(loop=f"{folder}/loop.py:several"),
            ),
        )
        tokenizer = load_tokenizer(folder)
        rates = [once(config, tokenizer) for _ in range(ROUNDS)]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = [
        Figure("requests of conversations", median(rates), "requests/s", limit=2000.0, share=median(rates) / 2000.0),
        Figure("resident memory of the driver's part", memory, "GiB", limit=4.0, share=memory / 4.0),
    ]
    write("conversations", figures, {"conversations": CONVERSATIONS, "answers": ANSWERS, "engines": ENGINES})


if __name__ == "__main__":
    main()
