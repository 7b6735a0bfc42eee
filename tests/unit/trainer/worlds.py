"""Small stand-ins for what the loop talks to (policy, engines, weight sync, data, scores), and a
loop over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    ActorConfig,
    DataConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.rollout.evaluation import Validator
from hybridflow.rollout.protocols import SyncReport
from hybridflow.saving.manifest import say_saved
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.samples import Sampled, Samples
from hybridflow.trainer.session import Session
from hybridflow.workers.policy import PolicyWorker

ROWS = 10
PROMPTS = 4
N = 2


class Ended:
    """A call of a group that has ended when it is made."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self.value


class Immediate:
    """Calls methods of its own by the names of the worker's; no call takes time."""

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        found = getattr(self, method.__name__)(*args)
        return await found if inspect.isawaitable(found) else found

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        found: DataProto = await self.call(method, batch)
        return found

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        raise AssertionError("it is not trained")

    async def memory(self) -> Mapping[str, float]:
        return {}


@dataclass(frozen=True)
class Answer:
    """A sample that has ended: a row of a batch."""

    batch: DataProto
    row: int

    def done(self) -> bool:
        return True


class World(Immediate):
    """Policy, engines and sync in one: notes every call, and checks that engines answer with the
    weights they were given."""

    def __init__(self, difference: float = 0.0, applied: Sequence[bool] = (True, True)) -> None:
        self.calls: list[str] = []
        self.difference = difference
        self.applied = list(applied)
        self.trained = self.engine_version = self.policy_version = -1
        self.seeds: list[int] = []
        self.fail_save = False
        self.first_rows = PROMPTS * N
        self.stale: dict[str, str] = {}

    # the policy
    def set_optimizer(self, config: OptimConfig) -> None:
        self.calls.append("set_optimizer")

    def freeze_reference(self) -> None:
        self.calls.append("freeze_reference")

    async def log_probs(self, batch: DataProto) -> DataProto:
        self.calls.append("log_probs")
        response = batch.jagged("response_ids")
        old = Jagged(np.full(len(response.values), -1.0, np.float32), response.offsets)
        return DataProto.from_columns({"old_log_probs": old, "entropys": old})

    async def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        self.calls.append("ref_log_probs")
        found = await self.log_probs(batch)
        return found.rename({"old_log_probs": "ref_log_probs"}).select(["ref_log_probs"])

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        assert method is PolicyWorker.update_policy and seed is not None
        self.calls.append("update")
        self.seeds.append(seed)
        assert {"advantages", "response_ids"} <= set(batch.columns)
        return [
            Update({"loss": 0.5, "actor/ppo_kl": i * 0.1}, 1.0, 1e-3, applied)
            for i, applied in enumerate(self.applied)
        ]

    async def later_log_probs(self, batch: DataProto, seed: int) -> DataProto:
        return await self.log_probs(batch.rows(np.arange(len(batch)) >= self.first_rows))

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[Sequence[Update], DataProto]:
        updates = await self.update(PolicyWorker.update_policy, batch, seed)
        is_first = np.arange(len(batch)) < self.first_rows
        rows = batch.rows(is_first)
        response = rows.jagged("response_ids")
        old = Jagged(np.full(len(response.values), -1.0, np.float32), response.offsets)
        found = DataProto.from_columns({"old_log_probs": old, "entropys": old})
        if later is None:
            return updates, rows.union(found)
        assert len(later) == (~is_first).sum()
        return updates, batch.union(DataProto.concat([found, later]))

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.calls.append("save")
        if self.fail_save:
            raise OSError(28, "No space left on device")
        assert background
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        say_saved(folder)

    async def is_saved(self) -> bool:
        return True

    def load(self, folder: Path, optim: OptimConfig, with_reference: bool = False) -> None:
        assert folder.is_dir()
        self.calls.append(f"load reference={with_reference}")

    # the engines, which answer at once
    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> list[Answer]:
        found = self.generate(prompts, training=training)
        return [Answer(found, row) for row in range(len(found))]

    async def advance(self) -> None:
        raise AssertionError("all samples have ended")

    async def answers(self, samples: Sequence[Answer]) -> DataProto:
        return self.shown(samples)

    def shown(self, samples: Sequence[Answer]) -> DataProto:
        return DataProto.concat([one.batch.rows([one.row]) for one in samples])

    async def begun(self, samples: Sequence[Answer]) -> DataProto | None:
        return None

    async def abort(self, samples: Sequence[Answer]) -> None:
        """They have ended, and nobody takes them."""

    async def forget(self) -> None:
        """All samples have ended."""

    async def load_metrics(self) -> dict[str, float]:
        return {"engine/idle_share": 0.5}

    async def sleep(self) -> None:
        """It holds no memory."""

    async def wake(self, tags: Sequence[str]) -> None:
        """It holds no memory."""

    async def close(self) -> None:
        """It has no tasks."""

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        self.calls.append("generate" if training else "answer")
        rows = [np.arange(2 + i % 3) for i in range(len(prompts))]
        responses = Jagged.from_rows(rows, np.int64)
        log_probs = Jagged(
            np.full(len(responses.values), -1.0 + self.difference, np.float32), responses.offsets
        )
        return DataProto.from_columns(
            {
                "response_ids": responses,
                "response_mask": Jagged(
                    np.ones(len(responses.values), np.bool_), responses.offsets
                ),
                "rollout_log_probs": log_probs,
                "response_versions": Jagged(
                    np.full(len(responses.values), self.engine_version, np.int64), responses.offsets
                ),
                "finish_reason": np.array(["stop"] * len(prompts), dtype=object),
                "weight_version": np.array([str(self.engine_version)] * len(prompts), dtype=object),
            }
        )

    # the sync
    async def sync(self, version: int) -> SyncReport:
        self.calls.append(f"sync {version}")
        self.engine_version = version
        return SyncReport(version, 0.5, 1000, dict(self.stale))


class Rows:
    """A dataset of ten one-token prompts."""

    def __len__(self) -> int:
        return ROWS

    def batch(self, indices: np.ndarray) -> DataProto:
        def objects(value: Any) -> np.ndarray:
            return np.array([value] * len(indices), dtype=object)

        return DataProto.from_columns(
            {
                "prompt_ids": Jagged.from_rows([np.array([i]) for i in indices], np.int64),
                "data_source": objects("toy"),
                "ground_truth": objects("1"),
                "extra_info": objects({}),
                "index": np.asarray(indices, np.int64),
            }
        )


class Scores:
    """Even samples are right."""

    class tokenizer:
        @staticmethod
        def decode(ids: Any) -> str:
            return str(ids)

    def begin(self, batch: DataProto, size: int) -> list[DataProto]:
        return [batch.rows(np.arange(start, start + size)) for start in range(0, len(batch), size)]

    async def finish(self, parts: Sequence[DataProto]) -> DataProto:
        return await self.score(DataProto.concat(list(parts)))

    def forget(self, parts: Sequence[DataProto]) -> None:
        """Nothing was begun."""

    async def score(self, batch: DataProto) -> DataProto:
        text = np.array(["x"] * len(batch), dtype=object)
        return DataProto.from_columns(
            {"response_text": text, "scores": (np.arange(len(batch)) % 2 == 0).astype(np.float32)}
        )


def config_of(
    folder: Path, kl: float = 0.0, bound: float | None = 0.01, **trainer: Any
) -> RunConfig:
    return RunConfig(
        output_dir=str(folder),
        data=DataConfig(train_batch_size=PROMPTS),
        actor=ActorConfig(kl_loss_coef=kl),
        rollout=RolloutConfig(n=N, logprob_diff_bound=bound),
        trainer=TrainerConfig(**{"total_steps": 3, "loggers": ("jsonl",), **trainer}),
    )


def trainer_of(
    config: RunConfig, world: World, samples: Samples | None = None, **others: Any
) -> RLTrainer:
    """`others`: the roles besides the policy."""
    session = Session(config)
    session.folder.mkdir(parents=True, exist_ok=True)
    rows: Any = Rows()
    scorer: Any = Scores()
    if samples is None:
        samples = Sampled(config, world, rows, scorer, session.timeline)
    validator = Validator(config, {"": rows}, scorer, session.folder)
    return RLTrainer(config, session, {"actor": world, **others}, world, samples, validator)


def records(trainer: RLTrainer, phase: str) -> list[Mapping[str, Any]]:
    trainer.session.close()
    return [
        record
        for record in read_jsonl(trainer.session.folder / "metrics.jsonl")
        if record["phase"] == phase
    ]
