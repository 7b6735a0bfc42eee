"""The entropy bonus with a target: the coefficient follows the entropy, reaches the loss and
survives a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.algorithms.entropy_control import EntropyControl
from hybridflow.batch import DataProto, Jagged
from hybridflow.config import derived
from hybridflow.config.schema import ActorConfig, RunConfig
from hybridflow.trainer.advantages import Advantages, advantages_step
from hybridflow.workers.losses import PolicyLoss

STEERED = ActorConfig(entropy_coef=0.5, entropy_target=1.0, entropy_coef_step=0.25)


def test_the_coefficient_rises_below_the_target_and_counts_only_there() -> None:
    control = EntropyControl(0.0, target=1.0, step=0.25)
    assert [control.update(entropy) for entropy in (0.5, 0.5, 0.9, 1.0, 3.0)] == [
        0.0,
        0.25,
        0.5,
        0.0,
        0.0,
    ]
    assert control.value == 0.25
    assert [control.update(2.0) for _ in range(3)] == [0.0] * 3 and control.value == 0.0


def batch_of(entropies: list[float]) -> DataProto:
    """Two answers; the last token is an observation, whose entropy does not count."""
    offsets = Jagged.from_rows([np.arange(2), np.arange(2)], np.int64).offsets
    mask = np.array([True, True, True, False])
    return DataProto.from_columns(
        {
            "uid": np.array([0, 0]),
            "scores": np.array([1.0, 0.0], np.float32),
            "response_ids": Jagged(np.arange(4), offsets),
            "response_mask": Jagged(mask, offsets),
            "entropys": Jagged(np.array([*entropies, 99.0], np.float32), offsets),
        }
    )


def test_each_token_gets_the_coefficient_of_its_step_and_a_resumed_run_goes_on_with_it() -> None:
    advantages = Advantages(RunConfig(actor=STEERED))
    found = advantages.add(batch_of([0.25, 0.5, 0.75])).jagged("entropy_coefs")
    assert found.values.tolist() == [0.5] * 4 and advantages.metrics["actor/entropy_coef"] == 0.5
    resumed = Advantages(RunConfig(actor=STEERED))
    resumed.restore(advantages.state())
    assert resumed.add(batch_of([0.0, 0.0, 0.0])).jagged("entropy_coefs").values[0] == 0.75
    assert resumed.add(batch_of([2.0, 2.0, 2.0])).jagged("entropy_coefs").values[0] == 0.0
    plain = Advantages(RunConfig())
    assert "entropy_coef" not in plain.state() and "entropy_coefs" not in plain.add(
        batch_of([1.0, 1.0, 1.0])
    )


class Micro:
    lengths = torch.tensor([2, 1])

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = {"old_log_probs": torch.zeros(3), "advantages": torch.zeros(3), **columns}


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_the_bonus_has_the_weight_of_the_column(coefficient: float) -> None:
    loss = PolicyLoss(STEERED)
    entropy = torch.ones(3, requires_grad=True)
    assert loss.with_entropy and "entropy_coefs" in loss.columns
    micro = Micro(entropy_coefs=torch.full((3,), coefficient))
    total, _, _ = loss(torch.zeros(3), entropy, micro)  # type: ignore[arg-type]
    total.backward()
    torch.testing.assert_close(entropy.grad, torch.full((3,), -coefficient))


def test_entropies_are_known_before_the_updates() -> None:
    config = RunConfig(actor=STEERED)
    assert derived.scores_before_update(config) and "entropys" in advantages_step(config).reads
    assert "entropy_coefs" in advantages_step(config).writes
