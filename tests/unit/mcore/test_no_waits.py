"""What routers note needs no number from the device: a fake tensor has none to give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridflow.mcore.router_replay import marked
from hybridflow.mcore.routers import _Corrected


def routing_map(tokens: int, experts: int, topk: int) -> torch.Tensor:
    chosen = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(t)) for t in range(tokens)]
    )
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen[:, :topk], True)


def counted(found: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    hook = _Corrected.__new__(_Corrected)
    hook.queue = SimpleNamespace(take=lambda: (real, False))  # type: ignore[assignment]
    router: Any = SimpleNamespace(config=SimpleNamespace(sequence_parallel=False))
    router.local_tokens_per_expert = found.sum(0).float()
    hook._correct(router, None, (found, found))
    counts: torch.Tensor = router.local_tokens_per_expert
    return counts


def test_marks_are_the_chosen_experts_in_order() -> None:
    found = routing_map(40, 16, 3)
    assert torch.equal(marked(found, 3), found.nonzero()[:, 1].view(-1, 3))


def test_padding_is_not_counted() -> None:
    found = routing_map(40, 16, 3)
    real = torch.arange(40) % 3 > 0
    assert torch.equal(counted(found, real), found[real].sum(0).float())


def test_neither_waits_for_the_device() -> None:
    with FakeTensorMode():
        found = torch.empty(40, 16, dtype=torch.bool)
        real = torch.empty(40, dtype=torch.bool)
        assert marked(found, 3).shape == (40, 3)
        assert counted(found, real).shape == (16,)
