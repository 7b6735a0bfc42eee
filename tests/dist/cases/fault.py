"""What Megatron-Core 0.16.1 gets wrong without a word, with our workaround and with it switched
off, on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import DENSE_UNTIED, TINY


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` inside."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def faults(worlds: Any, folder: Path) -> dict[str, Any]:
    """Each fault in a world of two: {"ours": .., "without": .., "expected": ..}."""
    from hybridflow.mcore import model

    result: dict[str, Any] = {}
    single = [(name, hf) for name, hf in (("moe", TINY), ("dense", DENSE_UNTIED))]
    expected = {}
    for name, hf in single:
        if worlds.mine(range(1)):
            with worlds.world(range(1)):
                expected[name] = _norms(policy_of({}, hf))
    cases = (
        (
            "batched sends of two interleaved stages",
            {"pipeline": 2, "virtual_pipeline": 2},
            "dense",
            "schedule_settings",
            lambda parallel: {},
        ),
        (
            "experts of other tensor parallelism",
            {"expert_tensor": 2},
            "moe",
            "mark_experts",
            lambda models: None,
        ),
    )
    for title, parallel, name, function, nothing in cases:
        result[title] = {"expected": expected.get(name)}
        for key, context in (
            ("ours", contextlib.nullcontext()),
            ("without", replaced(model, function, nothing)),
        ):
            if worlds.mine(range(2)):
                with worlds.world(range(2)), context:
                    result[title][key] = _norms(
                        policy_of(parallel, DENSE_UNTIED if name == "dense" else TINY)
                    )
    result["initial experts"] = _initial_experts(worlds)
    result["resumed optimizer"] = _resumed(worlds, folder)
    return result


def _norms(policy: Any, steps: range = range(2), fresh: bool = True) -> list[float]:
    """Gradient norm of each step: the second shows what the first did to the weights."""
    from hybridflow.config.schema import OptimConfig
    from hybridflow.workers.losses import sft_loss

    if fresh:
        policy.set_optimizer(OptimConfig(lr=1e-2, adam_eps=1e-3))
    norms = []
    for step in steps:
        batch = share_of(batch_of(8, step))
        norms.append(
            policy.train_mini_batch(
                batch, sft_loss, columns=(), max_tokens=16, temperature=1.0, with_entropy=False
            )[1]["grad_norm"]
        )
    return norms


def _initial_experts(worlds: Any) -> dict[str, Any]:
    """Whether two expert-parallel ranks hold the same first expert: with our weights, and in
    Megatron's own linear on a CPU."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    found: dict[str, Any] = {}
    if worlds.mine(range(2)):
        with worlds.world(range(2)):
            policy = policy_of({"expert": 2}, TINY)
            torch.manual_seed(1)
            upstream = ColumnParallelLinear(
                8,
                8,
                config=policy.stages[0].config,
                init_method=torch.nn.init.normal_,
                bias=False,
                is_expert=True,
            )
            ours = policy.weights()["decoder.layers.0.mlp.experts.linear_fc1.weight0"]
            for key, weight in (("ours", ours), ("without", upstream.weight)):
                both = [torch.empty_like(weight) for _ in range(2)]
                dist.all_gather(both, weight.detach().contiguous())
                found[key] = torch.equal(*both)
    return found


def _resumed(worlds: Any, folder: Path) -> dict[str, Any]:
    """Gradient norms after a checkpoint: uninterrupted, resumed, and resumed through Megatron's own
    loading of the optimizer."""
    from hybridflow.config.schema import OptimConfig
    from hybridflow.mcore import checkpoint
    from hybridflow.mcore.optimizer import inner_optimizers

    def upstream(optimizer: Any, step: int) -> None:
        original(optimizer, step)
        for inner in inner_optimizers(optimizer):
            inner.load_state_dict(inner.state_dict())

    original = checkpoint.set_adam_step
    found = {}
    if worlds.mine(range(2)):
        with worlds.world(range(2)):
            policy = policy_of({}, DENSE_UNTIED)
            _norms(policy)
            checkpoint.save(policy, folder / "resumed", phase="rl", step=2)
            found["expected"] = _norms(policy, range(2, 6), fresh=False)
    for key, function in (("ours", original), ("without", upstream)):
        if worlds.mine(range(2)):
            with worlds.world(range(2)), replaced(checkpoint, "set_adam_step", function):
                policy = policy_of({}, DENSE_UNTIED)
                policy.set_optimizer(OptimConfig(lr=1e-2, adam_eps=1e-3))
                checkpoint.load(policy, folder / "resumed")
                found[key] = _norms(policy, range(2, 6), fresh=False)
    return found
