"""A model on the stand-in device: what construction leaves on the CPU, and where a pass makes the
host wait."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

from hybridflow.config.schema import OptimConfig
from tests import models
from tests.dist.harness import stand_in_device
from tests.dist.harness.policies import batch_of, policy_of

KINDS = ("full", "adapter", "frozen")


def left_on_the_cpu(family: str, dtype: str) -> dict[str, Any]:
    """By kind of role and whether the optimizer is distributed: names (or shapes) of the
    floating-point tensors on the CPU, and how many tensors are on the device. Scalars are left out:
    torch's AdamW counts its steps on the CPU."""
    stand_in_device.install()
    return {
        f"{kind}, distributed optimizer {'on' if distributed else 'off'}": _devices(
            family, dtype, kind, distributed
        )
        for kind in KINDS
        for distributed in (True, False)
    }


def _devices(family: str, dtype: str, kind: str, distributed: bool) -> tuple[list[str], int]:
    known = {id(tensor) for tensor in _tensors()}
    policy = policy_of(
        {"distributed_optimizer": distributed},
        models.FAMILIES[family],
        dtype=dtype,
        backend="gloo",
        lora={"rank": 2} if kind == "adapter" else None,
        trains=kind != "frozen",
    )
    if policy.trains:
        policy.set_optimizer(OptimConfig(lr=1e-3))
    names = {
        id(tensor): name
        for stage in policy.stages
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
    }
    made = [tensor for tensor in _tensors() if id(tensor) not in known and tensor.dim()]
    on_cpu = [
        tensor for tensor in made if tensor.device.type == "cpu" and tensor.is_floating_point()
    ]
    return sorted(names.get(id(tensor), str(tuple(tensor.shape))) for tensor in on_cpu), len(
        made
    ) - len(on_cpu)


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]


def host_waits(family: str, recompute: str) -> dict[str, int]:
    """Run a training pass of one micro-batch where a wait raises; returns how many tensors
    Megatron's token dispatcher moved to the host."""
    from megatron.core.transformer.moe import token_dispatcher

    from hybridflow.algorithms.vocab_parallel import Scoring
    from hybridflow.mcore.packed import Cut, build_micro_batches
    from hybridflow.mcore.step import response_log_probs

    stand_in_device.install()
    policy = policy_of(
        {}, models.FAMILIES[family], dtype="bfloat16", backend="gloo", recompute=recompute
    )
    moved = []
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, **_: moved.append(tensor)
    batch = batch_of(6, 1)
    (micro,) = build_micro_batches(batch, [np.arange(6)], (), Cut())
    with stand_in_device.NoBlockingCopies():
        hidden = policy.chunks[0](
            micro.tokens, micro.positions, None, packed_seq_params=micro.packed
        )
        scoring = Scoring(models.FAMILIES[family]["vocab_size"], 1.0, False)
        log_probs, _, _ = response_log_probs(policy.chunks, hidden, micro, scoring)
        log_probs.sum().backward()
    return {"moved": len(moved)}
