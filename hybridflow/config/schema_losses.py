"""The keys of what corrects the policy loss and what is added to it. Part of `hybridflow.config.schema`, which says
what all keys have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hybridflow.config.keys import NonNegative, Positive
from hybridflow.config.schema_rewards import VERL_KL

# with +: the value of the estimate, and the gradient of k2, whose mean is that of the divergence
KlLoss = Annotated[Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"], VERL_KL]
DistillationLoss = Annotated[Literal["forward_kl_topk", "k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"], VERL_KL]


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What becomes of tokens that the engine gave another probability than the trainer: low precision, other kernels,
    weights of an earlier step (docs/rollout-correction.md; verl's names in brackets)."""

    # importance weight, trainer / engine, of each token's loss; token: its own; sequence: the product over its sequence
    weight: Literal["none", "token", "sequence"] = "none"  # [rollout_is]
    upper: Positive = 2.0  # larger weights count as it [rollout_is_threshold]
    lower: Positive | None = None  # with it, weights outside lower..upper count 0 (IcePop); null: without
    # bounds of statistics; tokens or sequences beyond them are left out of the loss and its counts, e.g. {seq_mean_k1:
    # [0.999, 1.001], token_k3: 0.5} [rollout_rs, rollout_rs_threshold]
    reject: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DistillationConfig:
    """What the policy learns from the teacher at the tokens that it has sampled (docs/algorithms.md; verl's names in
    brackets)."""

    coef: NonNegative = 0.0  # of the distance to the teacher in the loss; 0: none [distillation_loss_coef]
    # the distance at each token [loss_mode]; forward_kl_topk: forward KL over the teacher.top_k most likely tokens of
    # the teacher; others: an estimate of the reverse KL from the sampled token alone, as actor.kl_loss_type
    loss: DistillationLoss = "forward_kl_topk"
    task_rewards: bool = True  # false: the policy loss counts nothing, the teacher alone is learned [use_task_rewards]
