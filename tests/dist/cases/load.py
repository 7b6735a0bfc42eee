"""How many tokens each expert of each layer is said to have had in an update, on each rank of
different cuts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.schema import OptimConfig
from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import DEEPSEEK

ROWS = 14
LAYERS = 4
EXPERTS = 8


@dataclass(frozen=True)
class Cut:
    """A layout, its ranks, and the budget of a micro-batch."""

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 30


CUTS = [
    Cut("one micro-batch without padding", max_tokens=4096),
    Cut("many micro-batches"),
    Cut("full recompute", options={"recompute": "full"}),
    Cut("CP2 EP2", {"context": 2, "expert": 2}, 2),
    Cut("EP2 allgather", {"expert": 2, "moe_dispatcher": "allgather"}, 2),
    Cut(
        "PP2 VPP2 full recompute", {"pipeline": 2, "virtual_pipeline": 2}, 2, {"recompute": "full"}
    ),
    Cut("TP2 SP PP2 EP2", {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}, 4),
    Cut(
        "TP2 SP CP2 EP2 full recompute",
        {"tensor": 2, "sequence": True, "context": 2, "expert": 2},
        4,
        {"recompute": "full"},
    ),
]


def loads() -> list[dict[str, Any]]:
    """{name, padding, counts by layer} of every cut whose first rank this is; the first cut also
    has `expected`, counted by an unpacked pass."""
    from tests.dist.harness.worlds import measured

    return measured(CUTS, _measure)


def _measure(cut: Cut) -> dict[str, Any]:
    from hybridflow.workers.losses import sft_loss

    policy = policy_of(cut.parallel, DEEPSEEK, expert_bias_update_rate=0.01, **cut.options)
    policy.set_optimizer(OptimConfig(lr=1e-9))
    result: dict[str, Any] = {"name": cut.name}
    if cut == CUTS[0]:
        result["expected"] = _one_by_one(policy)
    counts = torch.zeros(LAYERS, EXPERTS)
    with _noted(policy, counts):
        for step in range(2):  # nothing of the first pass is left for the second
            policy.train_mini_batch(
                share_of(batch_of(ROWS, step)),
                sft_loss,
                columns=(),
                max_tokens=cut.max_tokens,
                temperature=1.0,
                with_entropy=False,
            )
    micro_batches = policy._micro_batches(share_of(batch_of(ROWS, 1)), cut.max_tokens, ())
    padding = torch.tensor(float(sum((~micro.packed.real).sum() for micro in micro_batches)))
    for value in (counts, padding):
        dist.all_reduce(value)
    return result | {"counts": counts.tolist(), "padding": float(padding)}


def _one_by_one(policy: Any) -> list[list[int]]:
    """Tokens of each expert in the forward pass, one sequence at a time: there is no padding, and
    no gradient that would count."""
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    for step in range(2):
        batch = batch_of(ROWS, step)
        for row in range(len(batch)):
            with policy.replay.during("record"):
                policy.log_probs(
                    batch.rows([row]), max_tokens=4096, temperature=1.0, with_entropy=False
                )
                # the last is not read
                routes = torch.from_numpy(policy.replay.recorded().values[:-1].astype("int64"))
            for layer in range(1, LAYERS):  # the first is dense
                counts[layer] += torch.bincount(routes[:, layer].reshape(-1), minlength=EXPERTS)
    return counts.tolist()


class _noted:
    """Adds up what this rank's routers have counted when the biases are about to move. They are put
    back: both updates route alike."""

    def __init__(self, policy: Any, counts: torch.Tensor) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        from hybridflow.mcore.model import held_weights

        self.routers = [
            module
            for stage in policy.stages
            for module in stage.modules()
            if isinstance(module, TopKRouter)
        ]
        self.biases = [
            (bias, bias.clone())
            for name, bias in held_weights(policy.stages).items()
            if name.endswith(".expert_bias")
        ]
        self.counts = counts

    def __enter__(self) -> None:
        self.module: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]
        self.original = self.module._update_router_expert_bias
        self.module._update_router_expert_bias = self._note

    def __exit__(self, *_: Any) -> None:
        self.module._update_router_expert_bias = self.original

    def _note(self, *arguments: Any, **named: Any) -> None:
        for router in self.routers:
            self.counts[router.layer_number - 1] += router.local_tokens_per_expert
        self.original(*arguments, **named)
        for bias, before in self.biases:
            assert not torch.equal(bias, before)
            bias.copy_(before)
