"""An Adam that counts its steps in the group (Transformer Engine's, Apex's) is saved and goes on
with its count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from hybridflow.mcore.optimizer import adam_step, prime_adam_state, set_adam_step


class FusedAdam:
    """As transformer_engine.pytorch.optimizers.FusedAdam counts: in the group, from the first step
    on; its state_dict takes every name in a parameter's state for a tensor that it owns."""

    NAMES = ("exp_avg", "exp_avg_sq", "master_param")

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[Any, dict[str, Any]] = {}

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def state_dict(self) -> list[Any]:
        return [{name: self.NAMES.index(name) for name in state} for state in self.state.values()]


def adam(kind: str) -> Any:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return FusedAdam([parameter]) if kind == "fused" else torch.optim.AdamW([parameter])


@pytest.mark.parametrize("kind", ["fused", "torch"])
def test_the_count_survives_a_save_and_a_load(kind: str) -> None:
    first = adam(kind)
    second = adam(kind)
    config = OptimizerConfig(optimizer="adam")
    saved, loaded = (SimpleNamespace(optimizer=adam, config=config) for adam in (first, second))
    prime_adam_state(saved)
    assert adam_step(saved) == 0
    first.state_dict()
    for _ in range(3):
        first.step()
    assert adam_step(saved) == 3
    prime_adam_state(loaded)
    set_adam_step(loaded, adam_step(saved))
    second.step()
    assert adam_step(loaded) == 4
