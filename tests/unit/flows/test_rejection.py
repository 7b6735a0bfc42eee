"""Rejection-sampling fine-tuning: which answers are learned, and the gradient, by other means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.check_entries import flow_problems
from hybridflow.config.schema import ActorConfig, AlgorithmConfig, RunConfig
from hybridflow.flows.rejection import Options, chosen
from hybridflow.trainer.flow_check import check_flow
from hybridflow.workers.losses import PolicyLoss
from tests.unit.flows.bodies import fitted
from tests.unit.trainer.worlds import World, config_of, records, trainer_of

VOCABULARY = 7


def rejecting(folder: Path, kl: float = 0.0, **options: Any) -> RunConfig:
    return replace(
        config_of(folder, kl, total_steps=1),
        algorithm=AlgorithmConfig(flow="rejection", flow_options=options),
        actor=ActorConfig(policy_loss="reinforce", kl_loss_coef=kl),
    )


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 3), st.booleans()), max_size=24),
    st.integers(0, 3),
    st.integers(-2, 3),
)
def test_the_best_answers_above_the_threshold_are_chosen(
    rows: list[tuple[int, int, bool]], best: int, threshold: int
) -> None:
    masks = [np.array([False, counts]) for _, _, counts in rows]
    batch = DataProto.from_columns(
        {
            "uid": np.array([uid for uid, _, _ in rows], np.int64),
            "rewards": np.array([reward for _, reward, _ in rows], np.float32),
            "response_mask": Jagged.from_rows(masks, np.bool_),
        }
    )
    found = chosen(batch, Options(float(threshold), best)).tolist()
    for row, (uid, reward, counts) in enumerate(rows):
        better = sum(
            of == uid and has and (other > reward or (other == reward and number < row))
            for number, (of, other, has) in enumerate(rows)
        )
        assert found[row] == (counts and reward > threshold and (best == 0 or better < best)), row


def test_the_gradient_is_that_of_cross_entropy_on_the_chosen_answers(
    tmp_path: Path,
) -> None:
    world = World()
    seen = list[DataProto]()
    update = world.update

    async def noted(method: Any, batch: DataProto, seed: int | None = None) -> Any:
        seen.append(batch)
        return await update(method, batch, seed)

    world.update = noted  # type: ignore[method-assign]
    config = rejecting(tmp_path / "run", best=1)
    (record,) = records(fitted(trainer_of(config, world)), "train")
    assert record["flow/chosen"] == 0.5
    (batch,) = seen
    answers = batch.jagged("response_ids")
    mask = torch.from_numpy(batch.jagged("response_mask").values.copy())
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(mask), VOCABULARY, generator=generator, requires_grad=True)
    ids = torch.from_numpy(answers.values.copy())

    log_probs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    loss = PolicyLoss(config.actor)
    sums = np.add.reduceat(mask.numpy().astype(np.int64), answers.offsets[:-1])
    columns = {"advantages": torch.from_numpy(batch.jagged("advantages").values.copy())[mask]}
    micro: Any = SimpleNamespace(lengths=torch.from_numpy(sums), columns=columns)
    total, count, _ = loss(log_probs[mask], None, micro)
    (total / count).backward()
    ours = logits.grad

    rows = [torch.arange(answers.offsets[row], answers.offsets[row + 1]) for row in (0, 2, 4, 6)]
    tokens = torch.cat(rows)
    other = logits.detach().clone().requires_grad_()
    torch.nn.functional.cross_entropy(other[tokens], ids[tokens]).backward()
    assert ours is not None and other.grad is not None
    torch.testing.assert_close(ours, other.grad)


def test_a_step_that_chooses_nothing_trains_nothing(tmp_path: Path) -> None:
    world = World()
    trainer = fitted(trainer_of(rejecting(tmp_path / "run", threshold=1.0), world))
    (record,) = records(trainer, "train")
    assert record["flow/chosen"] == 0 and "update" not in world.calls


def test_the_check_takes_it_with_its_loss_alone(tmp_path: Path) -> None:
    config = rejecting(tmp_path / "run", kl=0.1)
    said = list[str]()
    check_flow(config, said.append)
    assert said == [] and list(flow_problems(config)) == []
    (problem,) = flow_problems(replace(config, actor=ActorConfig()))
    assert "set actor.policy_loss=reinforce" in problem
