"""A kind of engine as a user would add one:
`rollout.engine=tests/unit/engines/counting_engine.py:counting`.

It answers a prompt by counting on from its last token, in this process. A model folder with a file
`broken` in it makes a start fail, and `kill` ends an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import ENGINES, Completion, WeightSpan
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import Order, Outcome


class CountingEngine:
    """One start of an engine."""

    def __init__(self, spec: EngineSpec, log_path: Path, check: Callable[[], None]) -> None:
        self.spec = spec
        self.log_path = log_path
        self._check = check
        self.running = False
        self.version = -1
        self.calls: list[str] = []

    def start(self) -> None:
        self.log_path.write_text("started\n")
        self.running = not (Path(self.spec.model_path) / "broken").exists()

    def wait_ready(self) -> None:
        self.check_alive()

    def check_alive(self) -> None:
        self._check()
        if not self.running:
            raise EngineError("ended", engine=self.spec.name, log_tail=self.log_tail())

    def log_tail(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> None:
        self.running = False

    kill = stop

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        with_routes: bool = False,
    ) -> list[Completion]:
        self.calls.append(f"generate at temperature {sampling.temperature}")
        span = (WeightSpan(str(self.version), 0, max_new_tokens),)
        counted = [[prompt[-1] + 1 + i for i in range(max_new_tokens)] for prompt in prompts]
        return [Completion(tokens, [-0.5] * len(tokens), "length", span) for tokens in counted]

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        return EngineLayout(self.spec.name, ("layout",) * self.spec.ranks)

    def receive(self, order: Order, plan: str) -> Outcome:
        self.version = order.version
        return Outcome(order.engine, order.number, "served", nbytes=8)

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self, tags: Sequence[str]) -> None:
        self.calls.append(f"wake {list(tags)}")


ENGINES.register("counting", CountingEngine)
