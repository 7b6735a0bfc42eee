"""What each rank does in the tests of low-rank adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.schema import OptimConfig
from tests.dist.cases.checkpoint import steps
from tests.dist.cases.parity import MODELS, Case, _log_probs, _train, _weights, wait_for
from tests.dist.harness.policies import policy_of

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
ROUTED = ("experts.linear_fc1", "experts.linear_fc2")
# name -> (model, targets); the last two adapt routed experts as well, or nothing else
ADAPTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("dense", ()),
    "moe": ("moe", ()),
    "deepseek": ("deepseek", ()),
    "experts": ("moe", ("linear_qkv", "linear_proj", *ROUTED)),
    "routed": ("moe", ROUTED),
    "latent": ("deepseek", ("linear_kv_up_proj", "linear_fc1", "linear_fc2", *ROUTED)),
}
# of the weights. Another order of sums changes log-probs of these models by 2e-6; with 0.2, as
# elsewhere, and adapters' steps by 1e-5
STD = 0.1


def _cases() -> Iterator[Case]:
    sp = {"tensor": 2, "sequence": True}
    pp2 = {"pipeline": 2}
    both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for model in ("dense", "moe", "deepseek", "experts"):
        yield Case(f"{model} one process", model)
    yield Case(
        "dense TP2 SP PP2 full recompute", "dense", {**sp, **pp2}, options={"recompute": "full"}
    )
    yield Case("dense TP4 (2 KV heads)", "dense", {"tensor": 4})
    yield Case("dense DP2", "dense", {"distributed_optimizer": False}, 2)
    yield Case("dense TP2 SP DP2 overlap", "dense", {**sp, **both}, 2)
    yield Case("dense PP2 VPP2 CP2", "dense", {"pipeline": 2, "virtual_pipeline": 2, "context": 2})
    yield Case("moe TP2 SP PP2 EP2", "moe", {**sp, **pp2, "expert": 2})
    yield Case("deepseek TP2 SP PP2 EP2", "deepseek", {**sp, **pp2, "expert": 2})
    yield Case("experts TP2 SP PP2 EP2", "experts", {**sp, **pp2, "expert": 2})
    yield Case("experts TP2 SP ETP2 EP2", "experts", {**sp, "expert": 2, "expert_tensor": 2}, 2)


def _further_cases() -> Iterator[Case]:
    """Further layouts, most of them of adapters on routed experts."""
    sp = {"tensor": 2, "sequence": True}
    pp2 = {"pipeline": 2}
    ep2 = {"expert": 2}
    both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for model in ("dense", "experts", "routed", "latent"):
        yield Case(f"{model} one process", model)
    yield Case("dense TP2 PP2", "dense", {"tensor": 2, **pp2})
    yield Case("dense TP4 SP (2 KV heads)", "dense", {"tensor": 4, "sequence": True})
    yield Case("dense DP2 distributed optimizer", "dense", {}, 2)
    yield Case("experts TP2 SP ETP1", "experts", {**sp, "expert_tensor": 1})
    yield Case("experts TP2 SP PP2 EP1 ETP2", "experts", {**sp, **pp2})
    yield Case("experts DP2 ETP2", "experts", {"expert_tensor": 2}, 2)
    yield Case("experts EP2 DP4 overlap", "experts", {**ep2, **both}, 4)
    yield Case("experts EP4 DP4", "experts", {"expert": 4, "distributed_optimizer": False}, 4)
    yield Case("experts EP2 CP2", "experts", {**ep2, "context": 2})
    yield Case("experts PP2 VPP2 EP2 DP2", "experts", {**pp2, "virtual_pipeline": 2, **ep2}, 2)
    allgather = {**ep2, "moe_dispatcher": "allgather"}
    yield Case("experts TP2 SP EP2 allgather", "experts", {**sp, **allgather})
    full = {"recompute": "full"}
    yield Case("experts TP2 SP EP2 full recompute", "experts", {**sp, **ep2}, options=full)
    some = {"recompute": "selective", "recompute_modules": ("moe_act",)}
    yield Case("experts TP2 SP EP2 moe_act recompute", "experts", {**sp, **ep2}, options=some)
    yield Case("routed TP2 SP PP2 EP2", "routed", {**sp, **pp2, **ep2})
    yield Case("routed EP2 DP2", "routed", ep2, 2)
    yield Case("latent TP2 SP PP2 EP2", "latent", {**sp, **pp2, **ep2})


CASES = {case.name: case for case in _cases()}
FURTHER_CASES = {case.name: case for case in _further_cases()}
# what ranks must tell each other, left out: name -> (adapted model, layout, name in `mcore.lora`,
# what stands there instead)
MUTATIONS: dict[str, tuple[str, dict[str, Any], str, Callable[..., Any]]] = {
    "what A makes is not added up": (
        "dense",
        {"tensor": 2},
        "reduce_from_tensor_model_parallel_region",
        lambda low, group: low,
    ),
    "the gradient of a whole A is not summed": (
        "dense",
        {"tensor": 2},
        "copy_to_tensor_model_parallel_region",
        lambda low, group: low,
    ),
    "a cut factor counts as whole": (
        "dense",
        {"tensor": 2},
        "set_tensor_model_parallel_attributes",
        lambda *_: None,
    ),
    "whole factors are not summed over the sequence": (
        "dense",
        {"tensor": 2, "sequence": True},
        "_mark_sequence_parallel",
        lambda *_: None,
    ),
    "whole factors are not summed over the ranks of an expert": (
        "experts",
        {"tensor": 2, "sequence": True},
        "_sum_gradient",
        lambda factors: factors,
    ),
}
MUTANTS = {name: Case(name, model, parallel) for name, (model, parallel, _, _) in MUTATIONS.items()}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Inside, with the mutation of that name, if it is one."""
    from hybridflow.mcore import lora

    if name not in MUTATIONS:
        yield
        return
    _, _, attribute, instead = MUTATIONS[name]
    original = getattr(lora, attribute)
    setattr(lora, attribute, instead)
    try:
        yield
    finally:
        setattr(lora, attribute, original)


def run_cases(names: list[str], folder: str) -> list[dict[str, Any]]:
    """On each rank: every case in order; results on the first rank of each."""
    from tests.dist.harness.worlds import measured

    def one(case: Case) -> dict[str, Any]:
        with mutated(case.name):
            return measure(case, Path(folder))

    return measured([(CASES | FURTHER_CASES | MUTANTS)[name] for name in names], one)


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Train adapters; what moved, and differences from one process (which comes first and writes
    its values)."""
    model, targets = ADAPTED[case.model]
    lora = {**LORA, "targets": targets}
    policy = policy_of(case.parallel, MODELS[model], STD, lora=lora, **case.options)
    result = {"name": case.name, "world": case.world, "trainable": policy.trainable_parameters}
    if case.world == 1:
        base = policy_of(case.parallel, MODELS[model], STD)
        found = _log_probs(policy)
        result["begins_off_by"] = float((found - _log_probs(base)).abs().max())
        # torch chooses another kernel for a weight without gradient (should_fold,
        # LinearAlgebra.cpp)
        for stage in base.stages:
            stage.requires_grad_(False)
        result |= {
            "begins_at_the_base": torch.equal(_log_probs(base), found),
            "all": base.trainable_parameters,
        }
    before = _base(policy)
    mine: dict[str, Any] = {
        "history": _train(policy),
        "log_probs": _log_probs(policy),
        **factors(policy),
        **_weights(policy),
    }
    result["base_moved"] = sorted(
        name for name, tensor in _base(policy).items() if not torch.equal(tensor, before[name])
    )
    result["not_adapters"] = _optimized_or_with_gradient(policy)
    if case.world == 1:
        # the models' one-process cases run at the same time
        partial = folder / f"{case.model}.partial"
        torch.save(mine, partial)
        partial.rename(folder / f"{case.model}.pt")
    wait_for(folder / f"{case.model}.pt")
    one = torch.load(folder / f"{case.model}.pt", weights_only=True)
    ours = torch.tensor(mine.pop("history"))
    theirs = torch.tensor(one.pop("history"))
    off = torch.tensor([float((mine[name] - one[name]).abs().max()) for name in mine]).max()
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    result |= {
        "tensors": float(off),
        "moved": min(
            float(tensor.abs().max()) for name, tensor in mine.items() if ".lora_B." in name
        ),
    }
    result |= {"loss": float((ours[:, 0] - theirs[:, 0]).abs().max())}
    return result | {"grad_norm": float(((ours[:, 1] - theirs[:, 1]) / theirs[:, 1]).abs().max())}


def factors(policy: Any) -> dict[str, torch.Tensor]:
    """Every factor whole, by PEFT's name, on every rank: put together from the rectangles that
    checkpoints are made of."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    from hybridflow.mcore.sharded_state import _adapter_shards

    policy.settle()
    whole = {name: torch.zeros(shape) for name, shape in policy.adapters.map.tensors().items()}
    for shard in (
        shard for shards in _adapter_shards(policy.adapters).values() for shard in shards
    ):
        if is_main_replica(shard.replica_id):
            whole[shard.key][
                tuple(
                    slice(s, s + n)
                    for s, n in zip(shard.global_offset, shard.local_shape, strict=True)
                )
            ] += shard.data
    for name in sorted(whole):
        dist.all_reduce(whole[name])
    return whole


def _base(policy: Any) -> dict[str, torch.Tensor]:
    """Copies of everything but adapters."""
    from hybridflow.mcore.model import held_weights
    from hybridflow.models.lora import is_adapter

    return {
        name: tensor.detach().clone()
        for name, tensor in held_weights(policy.stages).items()
        if not is_adapter(name)
    }


def _optimized_or_with_gradient(policy: Any) -> list[str]:
    """What beside adapters has a gradient, room for one, or optimizer state; and a size that does
    not fit."""
    from hybridflow.mcore.model import held_weights
    from hybridflow.mcore.optimizer import inner_optimizers
    from hybridflow.models.lora import is_adapter

    held = {
        name: tensor for name, tensor in held_weights(policy.stages).items() if not is_adapter(name)
    }
    found = [
        name
        for name, one in held.items()
        if one.requires_grad or one.grad is not None or hasattr(one, "main_grad")
    ]
    trained = sum(parameter.numel() for parameter, _ in policy.adapters.parameters().values())
    room = sum(
        buffer.grad_data.numel()
        for chunk in policy.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    )
    states = sum(
        state["exp_avg"].numel()
        for one in inner_optimizers(policy.optimizer.inner)
        for state in one.optimizer.state.values()
    )
    # buffers of the distributed optimizer are padded so that they divide
    return found + [
        f"{name} {size}"
        for name, size in (("gradients", room), ("optimizer", states))
        if size > trained + 1024
    ]


def _resumable(parallel: dict[str, Any], hf: dict[str, Any], targets: tuple[str, ...]) -> Any:
    policy = policy_of(parallel, hf, STD, lora={**LORA, "targets": tuple(targets)})
    policy.set_optimizer(
        OptimConfig(
            lr=4e-3, lr_decay_style="linear", lr_decay_steps=9, weight_decay=0.1, adam_eps=1e-3
        )
    )
    return policy


def _reference_log_probs(policy: Any) -> torch.Tensor:
    with policy.as_reference():
        return _log_probs(policy)


def export_save_and_go_on(
    parallel: dict[str, Any], hf: dict[str, Any], targets: tuple[str, ...], folder: str
) -> dict[str, Any]:
    """The base as a Hugging Face folder, one step, a reference (no longer the base), one step, a
    checkpoint and a folder; three more."""
    from hybridflow.mcore import checkpoint
    from hybridflow.mcore.hf_export import export

    policy = _resumable(parallel, hf, targets)
    export(policy, Path(folder) / "base", hf, None)
    steps(policy, range(1))
    at_reference = _log_probs(policy)
    policy.freeze_reference()
    steps(policy, range(1, 2))
    log_probs = _log_probs(policy)
    reference = _reference_log_probs(policy)
    checkpoint.save(policy, Path(folder) / "checkpoint", phase="rl", step=2)
    export(policy, Path(folder) / "hf", hf, None)
    result = {
        "log_probs": log_probs.tolist(),
        "reference_off_by": float((reference - at_reference).abs().max()),
    }
    result["moved"] = float((log_probs - reference).abs().max())
    result["copies_left"] = any(
        copy.untyped_storage().nbytes() for copy in policy.adapters._merged.tensors().values()
    )
    result["reference_elements"] = sum(
        tensor.numel() for tensor in policy.reference_state().values()
    )
    return result | {"history": steps(policy, range(2, 5)), **_state(policy)}


def load_and_go_on(
    parallel: dict[str, Any], hf: dict[str, Any], targets: tuple[str, ...], folder: str
) -> dict[str, Any]:
    """The same three steps from the checkpoint, in any layout; then what loading it into other
    adapters, or none, says."""
    from hybridflow.errors import CheckpointError
    from hybridflow.mcore import checkpoint

    policy = _resumable(parallel, hf, targets)
    policy.freeze_reference()
    checkpoint.load(policy, Path(folder) / "checkpoint")
    result = {"history": steps(policy, range(2, 5)), **_state(policy), "errors": []}
    mine = {**LORA, "targets": targets}
    for other in ({**mine, "alpha": 5.0}, {**mine, "targets": ("linear_proj",)}, None):
        changed = policy_of(parallel, hf, STD, lora=other)
        try:
            checkpoint.load(changed, Path(folder) / "checkpoint")
        except CheckpointError as error:
            result["errors"].append(str(error))
    return result


def _state(policy: Any) -> dict[str, Any]:
    return {
        "factors": {name: tensor.tolist() for name, tensor in factors(policy).items()},
        "reference": _reference_log_probs(policy).tolist(),
    }
