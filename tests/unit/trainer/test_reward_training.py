"""The loops of supervised and reward training with a small stand-in for the model: order, resume,
records, held-out accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    ActorConfig,
    OptimConfig,
    RewardTrainingConfig,
    RunConfig,
    SftConfig,
    TrainerConfig,
)
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.saving.manifest import say_saved
from hybridflow.single_controller import block_on
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.session import Session
from hybridflow.trainer.supervised import RewardTrainer, SftTrainer, pair_accuracy
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker
from tests.unit.trainer.worlds import Immediate

PAIRS = 10


class Pairs:
    """Pair i: prompt [i], chosen [i, i], rejected [i]."""

    def __len__(self) -> int:
        return PAIRS

    def batch(self, indices: np.ndarray) -> DataProto:
        columns = {
            "prompt_ids": [[i] for i in indices],
            "chosen_ids": [[i, i] for i in indices],
            "rejected_ids": [[i] for i in indices],
        }
        return DataProto.from_columns(
            {name: Jagged.from_rows(rows, np.int64) for name, rows in columns.items()}
        )


class Model(Immediate):
    """Scores a row by its length, so that the chosen answer wins, except behind prompt 3."""

    def __init__(self, applied: bool = True) -> None:
        self.applied = applied
        self.seen: list[list[int]] = []

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> list[Update]:
        assert method is ModelWorker.pair_step
        self.seen.append(batch.jagged("prompt_ids").values.tolist())
        return [
            Update(
                {"loss": 0.5, "reward/accuracy": 0.75, "reward/margin": 1.0},
                1.5,
                1e-3,
                self.applied,
            )
        ]

    def compute_scores(self, batch: DataProto) -> DataProto:
        prompts = np.array([batch["prompt_ids"].row(i)[0] for i in range(len(batch))])
        scores = np.where(prompts == 3, -1.0, 1.0) * batch.lengths("response_ids")
        return DataProto.from_columns({"rm_scores": scores.astype(np.float32)})

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        assert phase == "reward"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        say_saved(folder)

    async def is_saved(self) -> bool:
        return True

    def load(self, folder: Path, optim: OptimConfig) -> None:
        assert folder.is_dir()


def trainer_of(folder: Path, model: Any, steps: int, **actor: Any) -> RewardTrainer:
    training = RewardTrainingConfig(steps=steps, batch_size=4)
    config = RunConfig(
        output_dir=str(folder),
        actor=ActorConfig(**actor),
        reward_training=training,
        trainer=TrainerConfig(loggers=("jsonl",), save_every_steps=1),
    )
    session = Session(config)
    session.folder.mkdir(parents=True, exist_ok=True)
    pairs: Any = Pairs()
    return RewardTrainer(training, session, model, pairs, seed=1)


def test_a_resumed_training_sees_the_pairs_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Model()
    block_on(trainer_of(tmp_path / "whole", whole, 6).fit())
    first = Model()
    second = Model()
    begun = trainer_of(tmp_path / "cut", first, 3)
    block_on(begun.fit())
    block_on(begun.session.store.wait())
    # as if a fourth step had begun when it was killed
    begun.session.tracker.log(4, {"reward/loss": 9.0}, phase="reward")
    begun.session.close()
    resumed = trainer_of(tmp_path / "cut", second, 6)
    latest = resumed.session.store.latest()
    assert latest is not None and (latest.phase, latest.step) == ("reward", 3)
    resumed.session.resume(latest)
    block_on(resumed.resume(latest))
    block_on(resumed.fit())
    assert first.seen + second.seen == whole.seen
    resumed.session.close()
    records = list(read_jsonl(resumed.session.folder / "metrics.jsonl"))
    assert [(record["step"], record["reward/loss"]) for record in records] == [
        (step, 0.5) for step in range(1, 7)
    ]
    assert records[0]["reward/accuracy"] == 0.75 and records[0]["reward/grad_norm"] == 1.5


def test_a_gradient_that_is_not_finite_stops_it(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Model(applied=False), 3)
    with pytest.raises(
        HybridFlowError,
        match=(
            r"reward step 1: the gradient is not finite \(loss 0.5\); reduce "
            r"reward_training.optim.lr"
        ),
    ):
        block_on(trainer.fit())
    assert trainer.session.store.latest() is None


def test_it_is_skipped_where_the_actor_skips_it(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Model(applied=False), 3, on_nonfinite="skip")
    block_on(trainer.fit())
    assert trainer.step == 3


def test_accuracy_counts_pairs_whose_chosen_answer_scores_higher() -> None:
    model: Any = Model()
    pairs: Any = Pairs()
    assert block_on(pair_accuracy(model, pairs)) == pytest.approx(
        {"accuracy": 0.9, "margin": (9 * 1.0 - 1.0) / 10}
    )


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward_training\.batch_size=4 is more than the 3 rows"):
        session = trainer_of(tmp_path, Model(), 1).session
        few: Any = Pairs()
        few.__class__ = type("Few", (Pairs,), {"__len__": lambda self: 3})
        RewardTrainer(RewardTrainingConfig(steps=1, batch_size=4), session, Model(), few, seed=1)


class Policy(Immediate):
    """Reports what an update of a policy with prediction heads does."""

    means: ClassVar[dict[str, float]] = {
        "loss": 0.5,
        "actor/mtp/loss": 2.0,
        "actor/mtp/depth_1/accuracy": 0.25,
        "actor/load_balancing_loss": 1.0,
    }

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> list[Update]:
        assert method is PolicyWorker.sft_step
        return [Update(self.means, 1.5, 1e-3, True)]


def test_supervised_steps_record_what_the_heads_learn(tmp_path: Path) -> None:
    config = SftConfig(steps=2, batch_size=4)
    session = Session(
        RunConfig(output_dir=str(tmp_path), sft=config, trainer=TrainerConfig(loggers=("jsonl",)))
    )
    session.folder.mkdir(parents=True, exist_ok=True)
    policy: Any = Policy()
    pairs: Any = Pairs()
    block_on(SftTrainer(config, session, policy, pairs, seed=1).fit())
    session.close()
    records = list(read_jsonl(session.folder / "metrics.jsonl"))
    assert len(records) == 2
    for record in records:
        assert record["phase"] == "sft" and record["sft/loss"] == 0.5
        assert record["actor/mtp/loss"] == 2.0
        assert record["actor/mtp/depth_1/accuracy"] == 0.25
        assert "actor/load_balancing_loss" not in record
