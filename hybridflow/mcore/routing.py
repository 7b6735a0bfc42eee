"""Routing by softmax probabilities plus an expert bias (ERNIE 4.5), which Megatron supports only
for sigmoid scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe import router

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.models.layout import LocalTensor

_LEAST_SUM = 1e-12


def install() -> None:
    """Make Megatron's router support an expert bias with softmax scores. Idempotent."""
    original = router.topk_routing_with_score_function
    if getattr(original, "from_hybridflow", False):
        return

    def topk_routing_with_score_function(
        logits: torch.Tensor, topk: int, *args: Any, **named: Any
    ) -> Any:
        if named.get("expert_bias") is None or named.get("score_function") != "softmax":
            return original(logits, topk, *args, **named)
        return _biased_softmax(logits, topk, named["expert_bias"], named.get("router_replay"))

    topk_routing_with_score_function.from_hybridflow = True  # type: ignore[attr-defined]
    router.topk_routing_with_score_function = topk_routing_with_score_function


def shape_biases(model: torch.nn.Module, described: Sequence[LocalTensor]) -> None:
    """Reshape expert biases to their shape in the checkpoint ([1, experts] for ERNIE)."""
    for local in described:
        if local.is_buffer:
            module: Any = model.get_submodule(local.name.rpartition(".")[0])
            module.expert_bias = module.expert_bias.view(local.shape)
            module.local_tokens_per_expert = module.local_tokens_per_expert.view(local.shape)


def _biased_softmax(
    logits: torch.Tensor, topk: int, bias: torch.Tensor, replay: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, mask of chosen experts), both [tokens, experts], for logits [tokens,
    experts].

    The bias affects the choice of experts, not their weights, which sum to 1.
    """
    scores = logits.softmax(-1, dtype=torch.float32)
    biased = scores + bias

    def best(values: torch.Tensor, count: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = values.topk(count, dim=-1)
        return found.values, found.indices

    if replay is None:
        _, chosen = best(biased, topk)
    else:
        _, chosen = replay.get_replay_topk(biased, topk, None, None, best)
    weights = scores.gather(-1, chosen)
    weights = (weights / weights.sum(-1, keepdim=True).clamp(min=_LEAST_SUM)).to(logits.dtype)
    nothing = torch.zeros_like(logits)
    return nothing.scatter(-1, chosen, weights), nothing.bool().scatter(-1, chosen, True)
