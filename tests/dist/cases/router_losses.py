"""The gradients that the routers' losses add, on each rank of different cuts, and by their formulas
in float64."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.algorithms.losses import aggregate
from hybridflow.config.schema import OptimConfig
from tests import models
from tests.dist.cases.load import ROWS, Cut
from tests.dist.harness.policies import batch_of, policy_of, share_of

AUX_COEF = 0.7
Z_COEF = 0.3
CUTS = [
    Cut("one micro-batch", max_tokens=4096),
    Cut("many micro-batches, full recompute", options={"recompute": "full"}),
    Cut("CP2 EP2", {"context": 2, "expert": 2}, 2),
    Cut("DP2", {}, 2),
    Cut("TP2 SP PP2 EP2", {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}, 4),
]


# model, tokens of a micro-batch, aggregation of the main loss
FORMULAS = (("TINY", 4096, "token-mean"), ("TINY", 30, "token-sum"), ("DEEPSEEK", 30, "token-mean"))


def by_formulas() -> list[dict[str, Any]]:
    """`_by_formula` of each of `FORMULAS`."""
    return [_by_formula(*case) for case in FORMULAS]


def _by_formula(hf: str, max_tokens: int, mode: str) -> dict[str, Any]:
    """On one rank: what the losses add to the gradient of the last layer's router (whose input they
    do not reach), and the same by the papers' formulas from that router's inputs and weight; the
    reported losses and the formulas' own.
    """
    policy = _policy({}, hf, AUX_COEF, Z_COEF)
    routers = _routers(policy)
    name, last = list(routers.items())[-1]
    layers = [list[torch.Tensor]() for _ in routers]
    for inputs, router in zip(layers, routers.values(), strict=True):
        router.register_forward_pre_hook(
            lambda _, given, into=inputs: into.append(given[0].detach())
        )
    gradients, metrics = _update(policy, max_tokens, mode)
    plain, _ = _update(_policy({}, hf, 0.0, 0.0), max_tokens, mode)
    micro_batches = policy._micro_batches(batch_of(ROWS, 1), max_tokens, ())
    real = [micro.packed.real for micro in micro_batches]
    weight = last.weight.detach().double().requires_grad_()
    aux, z = _losses(weight, layers[-1], real, last.topk, last.score_function)
    (AUX_COEF * aux + Z_COEF * z).backward()
    means = [
        _losses(router.weight.double(), inputs, real, router.topk, router.score_function)
        for inputs, router in zip(layers, routers.values(), strict=True)
    ]
    seen = [torch.stack([pair[n].detach() for pair in means]).mean() for n in (0, 1)]
    return {
        "found": (gradients[name] - plain[name]).double().tolist(),
        "expected": weight.grad.tolist(),  # type: ignore[union-attr]
        "main": float(plain[name].abs().max()),
        "metrics": [
            metrics[key][0] / metrics[key][1]
            for key in ("actor/router_aux_loss", "actor/router_z_loss")
        ],
        "losses": [float(value) for value in seen],
        "micro_batches": len(real),
    }


def _losses(
    weight: torch.Tensor, inputs: list[torch.Tensor], real: list[torch.Tensor], topk: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load balancing, the mean over micro-batches by their tokens, and the z-loss, the mean over
    tokens."""
    total = sum(int(mask.sum()) for mask in real)
    aux = torch.zeros(())
    z = torch.zeros(())
    for hidden, mask in zip(inputs, real, strict=True):
        logits = hidden.reshape(len(mask), -1)[mask].double() @ weight.t()
        scores = logits.softmax(-1)
        if kind == "sigmoid":
            scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        tokens, experts = scores.shape
        share = torch.nn.functional.one_hot(scores.topk(topk).indices, experts).sum((0, 1)) / (
            tokens * topk
        )
        aux = aux + tokens / total * experts * (share * scores.mean(0)).sum()
        z = z + (logits.logsumexp(-1) ** 2).sum() / total
    return aux, z


def z_gradients() -> list[dict[str, Any]]:
    """{name, what the z-loss adds to the gradients of all routers, the metric} of each cut with
    this rank."""
    from tests.dist.harness.worlds import measured

    def added(cut: Any) -> dict[str, Any]:
        (with_loss, metrics), (without, _) = (
            _update(_policy(cut.parallel, "TINY", 0.0, coef, **cut.options), cut.max_tokens)
            for coef in (Z_COEF, 0.0)
        )
        values = {name: (value - without[name]).tolist() for name, value in with_loss.items()}
        return {"name": cut.name, "added": values, "metric": metrics.get("actor/router_z_loss")}

    return measured(CUTS, added, everywhere=True)


def _policy(parallel: dict[str, Any], hf: str, aux: float, z: float, **options: Any) -> Any:
    # a distributed optimizer leaves each rank its share of the reduced gradient alone
    parallel = {**parallel, "distributed_optimizer": False}
    policy = policy_of(parallel, getattr(models, hf), router_losses=(aux, z), **options)
    policy.set_optimizer(OptimConfig(lr=1e-9, clip_grad=0.0))
    return policy


def _update(
    policy: Any, max_tokens: int, mode: str = "token-mean"
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[float, float]]]:
    """Gradients of the routers by layer after an update, and its metrics."""
    metrics, _ = policy.train_mini_batch(
        share_of(batch_of(ROWS, 1)),
        _Supervised(mode),
        columns=(),
        max_tokens=max_tokens,
        temperature=1.0,
        with_entropy=False,
    )
    return {
        name: router.weight.main_grad.clone() for name, router in _routers(policy).items()
    }, metrics


class _Supervised:
    """The cross-entropy under an aggregation."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __call__(self, log_probs: torch.Tensor, entropy: Any, micro: Any) -> Any:
        return *aggregate(-log_probs, micro.lengths, self.mode), {}

    def count(self, lengths: torch.Tensor) -> torch.Tensor:
        return aggregate(torch.zeros(int(lengths.sum())), lengths, self.mode)[1]


def _routers(policy: Any) -> dict[str, Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    modules = (module for stage in policy.stages for module in stage.modules())
    return {f"layer {m.layer_number}": m for m in modules if isinstance(m, TopKRouter)}
