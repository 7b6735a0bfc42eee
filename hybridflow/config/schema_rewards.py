"""Configuration keys for the learning signal: scores (`reward`), advantages (`algorithm`), and
corrections and additions to the policy loss (parts of `actor`). Part of `hybridflow.config.schema`,
which documents the conventions."""

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
    """The source of response scores: the verifier for the row's data_source, or your own
    function."""

    # your own verifiers, [path/to/file.py:name], in addition to the built-in ones
    verifiers: tuple[Annotated[str, VERIFIER], ...] = ()
    path: str | None = None  # Python file; null: the verifiers
    # compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict;
    # or, called once for the samples of a prompt, (data_sources, solution_strs, ground_truths,
    # extra_infos, **kwargs) -> list. May be async
    name: str = "compute_score"
    # further keyword arguments of the function or of the verifiers
    kwargs: dict[str, Any] = field(default_factory=dict)
    # verifiers that score every row regardless of its data source, with weights, e.g. {gsm8k: 0.9,
    # format: 0.1}; empty: the verifier of its data source
    combine: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # weight of this score in the reward; validation uses the unweighted score
    # processes that score responses; null: one per core, at most 16; 0: in the driver, without a
    # deadline
    processes: NonNegativeInt | None = None
    timeout_s: Positive = 60.0  # deadline of one call of a function or verifier
    # treatment of a response whose scoring hangs, raises or returns an invalid value. zero: a score
    # of 0; drop: exclude it from loss and statistics; stop: end the run. The run also ends if all
    # rows of a step fail
    on_failure: Literal["zero", "drop", "stop"] = "zero"
    # DAPO's soft overlong penalty: the reward decreases linearly over the last N tokens before
    # data.max_response_length, by at most overlong_penalty; 0: off
    overlong_tokens: NonNegativeInt = 0
    # reward that is taken off at the limit; see overlong_tokens
    overlong_penalty: NonNegative = 1.0


@dataclass(frozen=True)
class AlgorithmConfig:
    """The dataflow of a step, and how advantages are computed from rewards."""

    # the algorithm's dataflow as a program (docs/flows.md), or your own, path/to/file.py:name;
    # null: ppo with a critic, else remax, dpo, distill or grpo depending on the estimator and the
    # teacher
    flow: Annotated[str | None, FLOW] = None
    # options of the flow, available as run.options
    flow_options: dict[str, Any] = field(default_factory=dict)
    # grpo: compares a sample with the others of its prompt; gae: uses the critic's values (PPO);
    # docs/algorithms.md lists all
    adv_estimator: Annotated[str, ESTIMATOR, _VERL_ESTIMATORS] = "grpo"
    # options of the estimator, in addition to the keys of this section
    adv_estimator_options: dict[str, Any] = field(default_factory=dict)
    # for grpo, gigpo, grpo_process, grpo_passk, gdpo; Dr.GRPO (algorithm=dr-grpo) disables it
    norm_adv_by_std: bool = True
    gamma: Share = 1.0  # gae, reinforce_plus_plus: discount per token; gigpo: per turn
    lam: Share = 1.0  # gae: 1 sums all future rewards, 0 looks one token ahead
    kl_coef: NonNegative = 0.0  # coefficient of the KL penalty in the reward
    kl_penalty: KlEstimate = "k1"  # per-token estimate of the KL divergence
    # adapt kl_coef to reach this mean KL per token; null: kl_coef is fixed
    kl_target: Positive | None = None
    kl_horizon: PositiveInt = 10000  # samples over which the adaptation takes effect
    # DAPO: replace groups whose samples all have the same score with groups of other prompts, using
    # at most this many batches of data.train_batch_size prompts per step; 0: keep every group
    dynamic_sampling: NonNegativeInt = 0
    # share of a step's sampled tokens that keep an advantage: those with the highest entropy before
    # its updates; 1: all
    top_entropy_share: Annotated[float, Above(0), AtMost(1)] = 1.0
    # DAPO: exclude answers that reach data.max_response_length from loss and statistics
    overlong_filter: bool = False


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction for tokens whose probability differs between engine and trainer because of low
    precision, different kernels or stale weights (docs/rollout-correction.md; verl's names in
    brackets)."""

    # importance weight, trainer / engine, of each token's loss; token: its own; sequence: the
    # product over its sequence
    weight: Literal["none", "token", "sequence"] = "none"  # [rollout_is]
    upper: Positive = 2.0  # upper bound of weights [rollout_is_threshold]
    # with it, weights outside lower..upper become 0 (IcePop); null: disabled
    lower: Positive | None = None
    # bounds of statistics; tokens or sequences outside are excluded from the loss and its counts,
    # e.g. {seq_mean_k1: [0.999, 1.001], token_k3: 0.5} [rollout_rs, rollout_rs_threshold]
    reject: dict[str, Any] = field(default_factory=dict)
    # exclude sequences with negative advantage from the policy loss if the mean of log engine - log
    # policy over their tokens exceeds this, e.g. 0.5 (DeepSeek-V3.2; TRL's
    # off_policy_mask_threshold); null: exclude none
    off_policy: Positive | None = None


@dataclass(frozen=True)
class MtpConfig:
    """Multi-token-prediction heads, for models that have them (docs/prediction-heads.md)."""

    # train them next to the policy, which they do not change; false: an export copies them from
    # model.path unchanged [model.mtp.enable_train]
    train: bool = False
    # coefficient of their loss; Adam divides by the gradient's size, so that this matters only for
    # clipping by optim.clip_grad, which applies to them separately
    coef: Positive = 0.1
    lr: Positive | None = None  # their learning rate; null: the policy's


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation from the teacher on the tokens sampled by the policy (docs/algorithms.md; verl's
    names in brackets)."""

    # coefficient of the distance to the teacher in the loss; 0: none [distillation_loss_coef]
    coef: NonNegative = 0.0
    # the distance at each token [loss_mode]; forward_kl_topk: forward KL over the teacher.top_k
    # most likely tokens of the teacher; others: an estimate of the reverse KL from the sampled
    # token alone, as actor.kl_loss_type
    loss: DistillationLoss = "forward_kl_topk"
    # false: disable the policy loss, and learn only from the teacher [use_task_rewards]
    task_rewards: bool = True
