"""bfloat16 training on each rank: fp32 main weights, layouts against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import DENSE_UNTIED

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"distributed_optimizer": False}),
    "one process, distributed optimizer": (1, {}),
    "TP2 SP DP2": (4, {"tensor": 2, "sequence": True}),
    "PP2 VPP2 CP2": (4, {"pipeline": 2, "virtual_pipeline": 2, "context": 2}),
}


def bf16(worlds: Any) -> dict[str, Any]:
    """Losses of eight small updates, and the share of middling weights that one and all of them
    moved."""
    found = {}
    for name, (size, parallel) in LAYOUTS.items():
        if worlds.mine(range(size)):
            with worlds.world(range(size)):
                found[name] = _train(policy_of(parallel, DENSE_UNTIED, dtype="bfloat16"))
    return found


def _train(policy: Any) -> dict[str, Any]:
    from hybridflow.config.schema import OptimConfig
    from hybridflow.mcore.parallel import data_parallel_position
    from hybridflow.workers.losses import sft_loss

    policy.set_optimizer(
        OptimConfig(
            lr=1e-4, adam_eps=1e-12, adam_beta1=0.0, adam_beta2=0.9, weight_decay=0.0, clip_grad=1.0
        )
    )
    start = {name: weight.detach().clone() for name, weight in policy.weights().items()}
    losses = []
    moved = []
    for _ in range(8):
        metrics, info = policy.train_mini_batch(
            share_of(batch_of(8, 0)),
            sft_loss,
            columns=(),
            max_tokens=64,
            temperature=1.0,
            with_entropy=False,
        )
        pair = torch.tensor(metrics.get("loss", (0.0, 0.0)), dtype=torch.float64) * float(
            data_parallel_position()[2]
        )
        dist.all_reduce(pair)
        losses.append(float(pair[0] / pair[1]))
        moved.append(_moved(start, policy.weights()))
    return {
        "losses": losses,
        "moved": moved,
        "grad_norm": info["grad_norm"],
        "dtypes": sorted({str(w.dtype) for w in start.values()}),
    }


def _moved(start: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> float:
    """Share of weights between 1/8 and 1/4 (steps of 2^-10 in bfloat16, ten times an update) that
    differ from the start."""
    chosen = total = 0
    for name, weight in now.items():
        middling = (start[name].abs() >= 0.125) & (start[name].abs() < 0.25)
        chosen = chosen + int((weight[middling] != start[name][middling]).sum())
        total = total + int(middling.sum())
    return chosen / max(total, 1)
