"""The keys of what the policy learns from: where scores come from (`reward`), how they become
advantages (`algorithm`), what corrects the policy loss and what is added to it (parts of `actor`).
Part of `hybridflow.config.schema`, which says what all keys have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hybridflow.config.keys import (
    ESTIMATOR,
    FLOW,
    VERIFIER,
    Above,
    Aliases,
    AtMost,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
)

_VERL_KL = Aliases(
    (
        *(
            ("kl", "k1"),
            ("mse", "k2"),
            ("low_var_kl", "k3"),
            ("kl+", "k1+"),
            ("low_var_kl+", "k3+"),
        ),
        *(("k2+", "k2"), ("mse+", "k2")),  # k2 with its own gradient
    )
)
_VERL_ESTIMATORS = Aliases(
    (
        ("grpo_vectorized", "grpo"),
        ("rloo_vectorized", "rloo"),
        ("tir_optimal_token_baseline", "optimal_token_baseline"),
    )
)
KlEstimate = Annotated[Literal["k1", "abs", "k2", "k3"], _VERL_KL]
# with +: the value of the estimate, and the gradient of k2, whose mean is that of the divergence
KlLoss = Annotated[Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"], _VERL_KL]
DistillationLoss = Annotated[
    Literal["forward_kl_topk", "k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"], _VERL_KL
]


@dataclass(frozen=True)
class RewardConfig:
    """Where the score of a response comes from: the verifier of its data_source, or one function of
    yours."""

    # of yours, [path/to/file.py:name], beside the built-in ones
    verifiers: tuple[Annotated[str, VERIFIER], ...] = ()
    path: str | None = None  # python file; null: the verifiers
    # compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict;
    # or, called once for the samples of a prompt, (data_sources, solution_strs, ground_truths,
    # extra_infos, **kwargs) -> list. May be async
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    # verifiers that judge every row, whatever its data source, with their weights, e.g. {gsm8k:
    # 0.9, format: 0.1}; empty: the one of its data source
    combine: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # of this score in the reward; validation counts the score itself
    # processes beside the driver in which responses are scored; null: one a core, at most 16; 0: in
    # the driver, without a deadline
    processes: NonNegativeInt | None = None
    timeout_s: Positive = 60.0  # deadline of one call of a function or verifier
    # what a response counts whose scoring hangs, raises or returns nonsense. zero: a score of 0;
    # drop: nothing, its tokens are masked and it enters no statistic; stop: the run ends. It ends
    # as well when all of a step do
    on_failure: Literal["zero", "drop", "stop"] = "zero"
    # DAPO's soft punishment: an answer loses reward in proportion to what it has of the last so
    # many tokens before data.max_response_length, and overlong_penalty with all of them; 0: none
    overlong_tokens: NonNegativeInt = 0
    overlong_penalty: NonNegative = 1.0


@dataclass(frozen=True)
class AlgorithmConfig:
    """The dataflow of a step, and how rewards become advantages."""

    # the steps of the algorithm as a program (docs/flows.md), one of yours: path/to/file.py:name;
    # null: ppo with a critic, else remax, dpo, distill or grpo as the estimator and the teacher ask
    flow: Annotated[str | None, FLOW] = None
    # of the flow, which reads them as run.options
    flow_options: dict[str, Any] = field(default_factory=dict)
    # grpo: a sample is compared with the others of its prompt; gae: with the critic's values (PPO);
    # docs/algorithms.md has all
    adv_estimator: Annotated[str, ESTIMATOR, _VERL_ESTIMATORS] = "grpo"
    # of it, besides the keys of this section
    adv_estimator_options: dict[str, Any] = field(default_factory=dict)
    # grpo, gigpo, grpo_process, grpo_passk, gdpo; Dr.GRPO (algorithm=dr-grpo) is without
    norm_adv_by_std: bool = True
    gamma: Share = 1.0  # gae, reinforce_plus_plus: discount of a token; gigpo: of a turn
    lam: Share = 1.0  # gae: 1 sums the rewards to go, 0 looks one token ahead
    kl_coef: NonNegative = 0.0  # KL penalty inside the reward
    kl_penalty: KlEstimate = "k1"  # estimate of the KL divergence at each token
    # steer kl_coef towards this mean KL of a token; null: kl_coef is fixed
    kl_target: Positive | None = None
    kl_horizon: PositiveInt = 10000  # samples over which the steering takes effect
    # DAPO: groups whose samples all have one score are replaced by those of further prompts, and a
    # step generates at most so many batches of data.train_batch_size prompts; 0: every group is
    # kept
    dynamic_sampling: NonNegativeInt = 0
    # the share of a step's sampled tokens, those of highest entropy before its updates, that have
    # an advantage; 1: all
    top_entropy_share: Annotated[float, Above(0), AtMost(1)] = 1.0
    # DAPO: answers that reach data.max_response_length enter no loss and no statistic
    overlong_filter: bool = False


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What becomes of tokens that the engine gave another probability than the trainer: low
    precision, other kernels, weights of an earlier step (docs/rollout-correction.md; verl's names
    in brackets)."""

    # importance weight, trainer / engine, of each token's loss; token: its own; sequence: the
    # product over its sequence
    weight: Literal["none", "token", "sequence"] = "none"  # [rollout_is]
    upper: Positive = 2.0  # larger weights count as it [rollout_is_threshold]
    # with it, weights outside lower..upper count 0 (IcePop); null: without
    lower: Positive | None = None
    # bounds of statistics; tokens or sequences beyond them are left out of the loss and its counts,
    # e.g. {seq_mean_k1: [0.999, 1.001], token_k3: 0.5} [rollout_rs, rollout_rs_threshold]
    reject: dict[str, Any] = field(default_factory=dict)
    # sequences of negative advantage count 0 in the policy loss where the mean of log engine - log
    # policy over their tokens is over this, e.g. 0.5 (DeepSeek-V3.2; TRL's
    # off_policy_mask_threshold); null: all count
    off_policy: Positive | None = None


@dataclass(frozen=True)
class DistillationConfig:
    """What the policy learns from the teacher at the tokens that it has sampled
    (docs/algorithms.md; verl's names in brackets)."""

    # of the distance to the teacher in the loss; 0: none [distillation_loss_coef]
    coef: NonNegative = 0.0
    # the distance at each token [loss_mode]; forward_kl_topk: forward KL over the teacher.top_k
    # most likely tokens of the teacher; others: an estimate of the reverse KL from the sampled
    # token alone, as actor.kl_loss_type
    loss: DistillationLoss = "forward_kl_topk"
    # false: the policy loss counts nothing, the teacher alone is learned [use_task_rewards]
    task_rewards: bool = True
