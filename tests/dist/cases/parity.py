"""Layouts that must train exactly as one process does, and what each rank does to show it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import DEEPSEEK, DENSE, GLM4, TINY

MODELS = {
    "moe": TINY,
    "dense": DENSE,
    "deepseek": DEEPSEEK,
    "glm": GLM4,
}
STEPS = 3
ROWS = 16


@dataclass(frozen=True)
class Case:
    """A layout. `data` is what remains of the world for data parallelism; keys of `parallel` are
    `actor.parallel`'s."""

    name: str
    model: str
    parallel: dict[str, Any] = field(default_factory=dict)
    data: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of Policy
    quick: bool = False  # part of `make test`

    @property
    def world(self) -> int:
        return (
            prod(self.parallel.get(key, 1) for key in ("tensor", "pipeline", "context")) * self.data
        )


TP2: dict[str, Any] = {"tensor": 2}
SP: dict[str, Any] = {"tensor": 2, "sequence": True}
PP2: dict[str, Any] = {"pipeline": 2}
VPP: dict[str, Any] = {"pipeline": 2, "virtual_pipeline": 2}
CP2: dict[str, Any] = {"context": 2}
PLAIN: dict[str, Any] = {"distributed_optimizer": False}
BOTH: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def _cases() -> Iterator[Case]:
    for model in MODELS:
        yield Case(f"{model} one process", model, quick=True)
    yield from _dense_cases()
    yield from _mixture_cases()


def _dense_cases() -> Iterator[Case]:
    tp2 = TP2
    sp = SP
    pp2 = PP2
    vpp = VPP
    cp2 = CP2
    plain = PLAIN
    both = BOTH
    yield Case("dense TP2", "dense", tp2)
    yield Case("dense TP2 SP", "dense", sp)
    yield Case("dense TP4 (2 KV heads)", "dense", {"tensor": 4})
    yield Case("dense TP4 SP (2 KV heads)", "dense", {"tensor": 4, "sequence": True})
    yield Case("dense PP2", "dense", pp2)
    yield Case("dense PP4", "dense", {"pipeline": 4})
    yield Case(
        "dense PP3, 1 + 2 + 1 layers",
        "dense",
        {"pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    )
    yield Case("dense PP2, 3 + 1 layers", "dense", {"pipeline": 2, "first_stage_layers": 3})
    three = {"pipeline": 3, "layers_per_stage": (0, 3, 1)}
    yield Case("dense PP3, layers 0 + 3 + 1", "dense", three, quick=True)
    yield Case("dense PP2 VPP2", "dense", vpp)
    yield Case("dense CP2", "dense", cp2)
    yield Case("dense CP4", "dense", {"context": 4})
    yield Case("dense DP2", "dense", plain, 2)
    yield Case("dense DP2 distributed optimizer", "dense", {}, 2)
    yield Case("dense DP2 overlap", "dense", both, 2)
    yield Case(
        "dense DP2 overlap of the reduction", "dense", {**plain, "overlap_grad_reduce": True}, 2
    )
    yield Case("dense TP2 CP2", "dense", {**tp2, **cp2})
    yield Case("dense TP2 SP CP2", "dense", {**sp, **cp2}, quick=True)
    yield Case("dense PP2 CP2", "dense", {**pp2, **cp2})
    yield Case("dense PP2 VPP2 CP2", "dense", {**vpp, **cp2})
    yield Case("dense TP2 SP PP2", "dense", {**sp, **pp2})
    yield Case("dense TP2 SP DP2 overlap", "dense", {**sp, **both}, 2)
    yield Case("dense CP2 DP2 overlap", "dense", {**cp2, **both}, 2, quick=True)
    yield Case("dense PP2 VPP2 DP2 overlap", "dense", {**vpp, **both}, 2, quick=True)
    yield Case(
        "dense TP2 SP full recompute", "dense", sp, options={"recompute": "full"}, quick=True
    )
    yield Case("dense PP2 VPP2 full recompute", "dense", vpp, options={"recompute": "full"})
    yield Case(
        "dense CP2 selective recompute",
        "dense",
        cp2,
        options={"recompute": "selective"},
        quick=True,
    )
    yield Case(
        "dense TP2, logits 3 tokens at a time",
        "dense",
        tp2,
        options={"logits_chunk_tokens": 3},
        quick=True,
    )
    yield Case("dense TP2 SP PP2 CP2", "dense", {**sp, **pp2, **cp2})
    yield Case("dense TP2 SP PP2 VPP2 CP2", "dense", {**sp, **vpp, **cp2})
    yield Case("dense TP2 SP CP2 DP2 overlap", "dense", {**sp, **cp2, **both}, 2)
    yield Case("dense PP2 VPP2 CP2 DP2", "dense", {**vpp, **cp2}, 2)


def _mixture_cases() -> Iterator[Case]:
    sp = SP
    pp2 = PP2
    vpp = VPP
    cp2 = CP2
    plain = PLAIN
    both = BOTH
    gather = {"moe_dispatcher": "allgather"}
    yield Case("moe TP2 SP", "moe", sp)
    yield Case("moe PP2", "moe", pp2)
    yield Case("moe PP2 VPP2", "moe", vpp)
    interleaved = {**vpp, "layers_per_stage": (1, 2, 1, 0)}
    yield Case("moe PP2 VPP2, layers 1 + 2 + 1 + 0", "moe", interleaved, quick=True)
    yield Case("moe PP2, 3 + 1 layers", "moe", {**pp2, "first_stage_layers": 3})
    yield Case("moe CP2", "moe", cp2)
    yield Case("moe DP2", "moe", plain, 2)
    yield Case("moe EP2", "moe", {"expert": 2}, 2)
    yield Case("moe EP2 allgather", "moe", {"expert": 2, **gather}, 2, quick=True)
    yield Case("moe EP2 plain optimizer", "moe", {"expert": 2, **plain}, 2)
    yield Case("moe EP4", "moe", {"expert": 4}, 4)
    yield Case("moe EP4 allgather overlap", "moe", {"expert": 4, **gather, **both}, 4)
    yield Case("moe EP2 on CP2", "moe", {"expert": 2, **cp2})
    yield Case("moe ETP2 on DP2", "moe", {"expert_tensor": 2}, 2)
    yield Case("moe TP2 SP ETP1", "moe", {**sp, "expert_tensor": 1})
    yield Case("moe TP2 SP EP2", "moe", {**sp, "expert": 2})
    yield Case("moe TP2 SP EP2 allgather", "moe", {**sp, "expert": 2, **gather})
    yield Case(
        "moe TP2 SP EP2 full recompute", "moe", {**sp, "expert": 2}, options={"recompute": "full"}
    )
    yield Case("moe EP2 ETP2 on DP4", "moe", {"expert": 2, "expert_tensor": 2}, 4, quick=True)
    yield Case(
        "moe EP2 ETP2 allgather on DP4", "moe", {"expert": 2, "expert_tensor": 2, **gather}, 4
    )
    yield Case("moe TP2 SP ETP2 EP2 DP2", "moe", {**sp, "expert": 2, "expert_tensor": 2}, 2)
    yield Case(
        "moe TP2 SP ETP1 EP2 DP2 overlap",
        "moe",
        {**sp, "expert": 2, "expert_tensor": 1, **both},
        2,
        quick=True,
    )
    yield Case("moe PP2 VPP2 EP2", "moe", {**vpp, "expert": 2}, 2)
    yield Case("moe TP2 SP PP2 EP2", "moe", {**sp, **pp2, "expert": 2})
    yield Case("moe TP2 SP PP2 VPP2 EP2", "moe", {**sp, **vpp, "expert": 2}, quick=True)
    yield Case("moe CP2 EP2 DP2", "moe", {**cp2, "expert": 2}, 2)
    yield Case("moe TP2 SP CP2 EP4", "moe", {**sp, **cp2, "expert": 4}, quick=True)
    yield Case("moe TP2 SP PP2 EP2 DP2", "moe", {**sp, **pp2, "expert": 2}, 2)
    yield Case("moe TP2 SP PP2 VPP2 ETP2 DP2", "moe", {**sp, **vpp, "expert_tensor": 2}, 2)
    yield Case("moe PP2 VPP2 CP2 EP2 DP2", "moe", {**vpp, **cp2, "expert": 2}, 2)
    yield Case(
        "moe TP2 SP PP2 CP2 EP2 allgather", "moe", {**sp, **pp2, **cp2, "expert": 2, **gather}
    )
    yield Case("moe TP2 SP EP4 ETP1 DP4", "moe", {**sp, "expert": 4, "expert_tensor": 1}, 4)
    # latent attention, shared experts, biases, a first dense layer
    yield Case("deepseek TP2 SP EP2 PP2", "deepseek", {**sp, **pp2, "expert": 2}, quick=True)
    yield Case(
        "deepseek PP2, layers 3 + 1, EP2",
        "deepseek",
        {**pp2, "expert": 2, "layers_per_stage": (3, 1)},
        2,
    )
    yield Case("deepseek PP2 VPP2 EP2", "deepseek", {**vpp, "expert": 2}, 2)
    yield Case("deepseek CP2 EP2", "deepseek", {**cp2, "expert": 2}, quick=True)
    yield Case("glm TP2 SP CP2 EP2", "glm", {**sp, **cp2, "expert": 2})
    yield Case("glm PP2 VPP2 DP2 overlap", "glm", {**vpp, **both}, 2, quick=True)


CASES = {case.name: case for case in _cases()}


def run_cases(names: list[str], folder: str) -> list[dict[str, Any]]:
    """On each rank: every case in order in the window of ranks that `windows` gives it; results on
    the first rank of each window."""
    from tests.dist.harness.worlds import measured

    return measured([CASES[name] for name in names], lambda case: measure(case, Path(folder)))


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Train; differences from one process (which comes first and writes its values)."""
    from hybridflow.mcore import bootstrap

    started = time.perf_counter()
    policy = policy_of(case.parallel, MODELS[case.model], **case.options)
    _check_coordinates(case)
    mine = {
        "log_probs": _log_probs(policy),
        "history": torch.tensor(_train(policy)),
        "weights": _weights(policy),
    }
    if case.world == 1:
        # the models' one-process cases run at the same time
        partial = folder / f"{case.model}.partial"
        torch.save(mine, partial)
        partial.rename(folder / f"{case.model}.pt")
    wait_for(folder / f"{case.model}.pt")
    reference = torch.load(folder / f"{case.model}.pt", weights_only=True)
    ours = mine["history"]
    one = reference["history"]
    held = mine["weights"].items()
    weights = torch.tensor(
        max(
            (float((tensor - reference["weights"][name]).abs().max()) for name, tensor in held),
            default=0.0,
        )
    )
    dist.all_reduce(weights, op=dist.ReduceOp.MAX)
    compared = torch.tensor(len(mine["weights"]))
    dist.all_reduce(compared)
    assert compared >= len(reference["weights"]) > 20
    return {
        "name": case.name,
        "world": case.world,
        "megatron": bootstrap.MEGATRON_VERSION,
        "log_probs": float((mine["log_probs"] - reference["log_probs"]).abs().max()),
        "loss": float((ours[:, 0] - one[:, 0]).abs().max()),
        "grad_norm": float(((ours[:, 1] - one[:, 1]) / one[:, 1]).abs().max()),
        "weights": float(weights),
        "history": ours.tolist(),
        "seconds": time.perf_counter() - started,
    }


def _check_coordinates(case: Case) -> None:
    """The ranks stand where the planner of the weight transfer believes."""
    from hybridflow.config.derived import expert_tensor_size
    from hybridflow.config.schema import ParallelConfig
    from hybridflow.mcore.parallel import all_coordinates
    from hybridflow.models.layout import ParallelShape

    config = ParallelConfig(**case.parallel)
    shape = ParallelShape(
        ranks=case.world,
        tensor=config.tensor,
        pipeline=config.pipeline,
        virtual_pipeline=config.virtual_pipeline or 1,
        context=config.context,
        expert=config.expert,
        expert_tensor=expert_tensor_size(config),
        first_stage_layers=config.first_stage_layers,
        last_stage_layers=config.last_stage_layers,
        layers_per_stage=config.layers_per_stage,
    )
    assert all_coordinates() == shape.coordinates()


def _train(policy: Any) -> list[list[float]]:
    """(loss, grad norm, learning rate) a step. The gradient is clipped and the rate has a warm-up
    and a decay."""
    from hybridflow.config.schema import OptimConfig
    from hybridflow.mcore.parallel import data_parallel_position
    from hybridflow.workers.losses import sft_loss

    # a large epsilon: without it Adam turns rounding noise in a gradient near zero into a whole
    # step of either sign
    schedule = {
        "lr_decay_style": "cosine",
        "lr_warmup_steps": 2,
        "lr_decay_steps": 6,
        "min_lr": 1e-3,
    }
    policy.set_optimizer(
        OptimConfig(
            lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-3, clip_grad=1.0, **schedule
        )
    )
    history = []
    for step in range(STEPS):
        metrics, info = policy.train_mini_batch(
            share_of(batch_of(ROWS, step)),
            sft_loss,
            columns=(),
            max_tokens=64,
            temperature=1.0,
            with_entropy=False,
        )
        pair = torch.tensor(metrics.get("loss", (0.0, 0.0)), dtype=torch.float64)
        if not data_parallel_position()[2]:
            pair.zero_()
        dist.all_reduce(pair)
        history.append([float(pair[0] / pair[1]), info["grad_norm"], info["lr"]])
    return history


def _log_probs(policy: Any) -> torch.Tensor:
    """[2, n] log-probs and entropies of all rows, on every rank."""
    from hybridflow.mcore.parallel import data_parallel_position

    batch = batch_of(ROWS, 7)
    found = policy.log_probs(share_of(batch), max_tokens=64, temperature=0.7, with_entropy=True)
    rank, size, collects = data_parallel_position()
    whole = torch.zeros(2, len(batch["response_ids"].values))
    if collects:
        counts = [int(part["response_ids"].lengths.sum()) for part in batch.chunk(size)]
        start = sum(counts[:rank])
        whole[:, start : start + counts[rank]] = torch.stack(
            [torch.from_numpy(part.values.copy()) for part in found]
        )
    dist.all_reduce(whole)
    return whole


def _weights(policy: Any) -> dict[str, torch.Tensor]:
    """The HF tensors that this rank assembles as its stage's leader."""
    from hybridflow.mcore.parallel import all_coordinates
    from tests.dist.cases.gather import gather_stage, plan_stages

    ranks = all_coordinates()
    found = {}
    for plan in plan_stages(policy.family, ranks, 1 << 16, 4):
        if plan.stage == ranks[dist.get_rank()].pp_rank:
            for tensors in gather_stage(plan, policy.parameters(), torch.float32):
                found |= tensors
    return found


def wait_for(path: Path) -> None:
    """Until another rank has written `path`."""
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written: the one-process case failed"
        time.sleep(0.1)
