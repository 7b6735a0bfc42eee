"""A router is told of the micro-batch that it computes, in the orders in which pipeline schedules
compute and recompute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hybridflow.mcore.routers import MicroBatchTracker, RecomputationQueue


class Stage(torch.nn.Module):
    """Two "routers" that multiply; what each of their calls was told is noted."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.routers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
        self.tracker = MicroBatchTracker([self], "label")
        self.queues = [RecomputationQueue(self.tracker) for _ in self.routers]
        self.told: list[list[tuple[Any, bool]]] = [[], []]
        for router, queue, told in zip(self.routers, self.queues, self.told, strict=True):
            router.register_forward_pre_hook(
                lambda *_, queue=queue, told=told: told.append(queue.take())
            )

    def _layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.routers[1](self.routers[0](x))

    def forward(self, x: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        return (
            checkpoint(self._layers, x, use_reentrant=True) if self.recompute else self._layers(x)
        )


def forward(stage: Stage, label: str | None) -> torch.Tensor:
    packed = SimpleNamespace() if label is None else SimpleNamespace(label=label)
    output: torch.Tensor = stage(torch.ones(1, 1, requires_grad=True), packed_seq_params=packed)
    return output


@pytest.mark.parametrize("order", ["f1 f2 b1 f3 b2 b3", "f1 b1 f2 b2", "f1 f2 f3 b1 b2 b3"])
@pytest.mark.parametrize("recompute", [True, False])
def test_routers_are_told_in_the_order_of_a_schedule(order: str, recompute: bool) -> None:
    stage = Stage(recompute)
    outputs = {}
    for step in order.split():
        if step[0] == "f":
            outputs[step[1]] = forward(stage, step[1])
        else:
            outputs[step[1]].backward()
    expected = [(step[1], step[0] == "b") for step in order.split() if recompute or step[0] == "f"]
    assert stage.told == [expected, expected]
    assert [queue.pending() for queue in stage.queues] == [0, 0]


def test_a_pass_without_gradient_is_not_recomputed() -> None:
    stage = Stage(recompute=True)
    with torch.no_grad():
        forward(stage, "1")
    assert stage.told[0] == [("1", False)] and stage.queues[0].pending() == 0


def test_a_removed_tracker_is_told_nothing() -> None:
    stage = Stage(recompute=False)
    stage.tracker.remove()
    forward(stage, "1")
    assert stage.told == [[(None, True)], [(None, True)]]
    assert not stage._forward_hooks and not stage._forward_pre_hooks


def test_what_a_failed_pass_has_left_is_forgotten() -> None:
    stage = Stage(recompute=True)
    forward(stage, "failed")
    assert stage.queues[0].pending() == 1
    with pytest.raises(RuntimeError):
        stage(torch.ones(1, 2), packed_seq_params=SimpleNamespace(label="raises"))
    assert stage.tracker.current is None and not stage.tracker.computing
    for queue in stage.queues:
        queue.clear()
    forward(stage, "next").backward()
    assert stage.told[1][-2:] == [("next", False), ("next", True)]


def test_a_micro_batch_that_brings_nothing_takes_no_turn() -> None:
    stage = Stage(recompute=True)
    forward(stage, None).backward()
    assert stage.told[0] == [(None, False), (None, True)]
