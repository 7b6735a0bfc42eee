"""Every configuration key, its type, default and meaning. Configurations are immutable.

Units are part of the name (`_s` seconds, `_tokens`, `_steps`) or stated in the comment. "prompts"
counts rows of the dataset, "samples" counts generated responses: samples = prompts x `rollout.n`.
The sections `algorithm` and `reward`, and parts of `actor`, are in
`hybridflow.config.schema_rewards`; `data`, `sft` and `reward_training` in `schema_data`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hybridflow.config.keys import (
    AGENT_LOOP,
    CALL_FORMAT,
    ENGINE,
    ENVIRONMENT,
    POLICY_LOSS,
    TOOL,
    TRACKER,
    TRANSPORT,
    Above,
    Aliases,
    AtLeast,
    AtMost,
    Below,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
)
from hybridflow.config.schema_data import DataConfig, RewardTrainingConfig, SftConfig
from hybridflow.config.schema_megatron import OptimConfig, ParallelConfig, RecomputeModule
from hybridflow.config.schema_rewards import (
    AlgorithmConfig,
    DistillationConfig,
    KlLoss,
    MtpConfig,
    RewardConfig,
    RolloutCorrectionConfig,
)

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
_VERL_LOSSES = Aliases((("vanilla", "ppo"), ("geo_mean", "gmpo")))
Placement = Literal["colocated", "own"]
Section = Literal[
    "actor", "critic", "cost_critic", "reference", "reward_model", "teacher", "rollout"
]
Packing = Literal["pack", "spread", "whole_nodes"]
LoraTarget = Literal[
    "linear_qkv",  # query, key and value
    "linear_q_proj",  # query of latent attention without a query latent
    "linear_q_down_proj",  # down projection to the query latent
    "linear_q_up_proj",  # up projection of the query latent
    "linear_kv_down_proj",  # down projection to the key and value latent
    "linear_kv_up_proj",  # up projection of the key and value latent
    "linear_proj",  # output of attention
    "linear_fc1",  # gate and up of dense MLPs and shared experts
    "linear_fc2",  # down of dense MLPs and shared experts
    "experts.linear_fc1",  # gate and up of routed experts
    "experts.linear_fc2",  # down of routed experts
]


@dataclass(frozen=True)
class ModelConfig:
    """The policy's model: `path` (a Hugging Face folder with weights) or, without a path,
    `hf_config` (random initialisation).
    """

    # HF folder with weights, or a hub id in the local cache; null: random weights of hf_config
    path: str | None = None
    # fields of a HF config.json; model_type selects the family. With `path`: sizes that its
    # config.json must contain
    hf_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # HF tokenizer folder; null: `path`
    # your own parameter map, path/to/file.py:MODEL_TYPE; null: a built-in one
    family: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # precision of weights and computation


@dataclass(frozen=True)
class OffloadConfig:
    """State to offload from the device while it is not needed (on CPU: to this process's memory).
    It is restored bit for bit."""

    # while the engines generate (critic, reward model: whenever idle); the reference's weights:
    # whenever it is not computing
    weights: bool = False
    gradients: bool = False  # outside updates
    optimizer: bool = False  # outside updates


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank adapters instead of the weights: W + alpha / rank * B A, with W frozen
    (docs/lora.md)."""

    rank: NonNegativeInt = 0  # 0: off, all weights are trained
    alpha: Positive = 32.0  # scale of the adapters is alpha / rank
    # Megatron's names of the adapted linear layers, e.g. [linear_qkv, linear_proj]; empty: all
    # except routed experts, which are adapted only if they are listed
    targets: tuple[LoraTarget, ...] = ()
    # must be 0: with dropout an update would train a different policy than the one that was scored
    dropout: float = 0.0
    # what engines receive. merged: weights with the adapters added; adapter: the weights once, then
    # only the adapters, which the engines keep next to them
    sync: Literal["merged", "adapter"] = "merged"


@dataclass(frozen=True)
class ActorConfig:
    """The trained policy: layout, optimizer and PPO update."""

    # megatron: all parallelisms and families; fsdp: FSDP2 over transformers' models, with data
    # parallelism only
    backend: Literal["megatron", "fsdp"] = "megatron"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    # train only the language model of a vision-language model, not its vision tower
    freeze_vision_tower: bool = True
    ppo_mini_batch_size: PositiveInt = 64  # prompts per optimizer update (x rollout.n samples)
    ppo_epochs: PositiveInt = 1  # passes of the updates over the samples of a step
    # packed tokens per forward pass of a data-parallel rank (all its context ranks together)
    max_tokens_per_micro_batch: PositiveInt = 4096
    # response tokens whose logits are materialised at a time, forward and backward
    logits_chunk_tokens: PositiveInt = 1024
    # activations recomputed in the backward pass: none, some modules (selective, with megatron) or
    # whole layers (full)
    recompute: Literal["none", "selective", "full"] = "none"
    # modules that selective recomputes; docs/parallelism.md describes each and the models that have
    # it
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    # treatment of an update whose loss or gradient is NaN or infinite
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # CONTRIBUTING.md describes custom losses; verl's bypass_mode is actor.old_log_probs=engine with
    # ppo or reinforce
    policy_loss: Annotated[str, POLICY_LOSS, _VERL_LOSSES] = "ppo"
    # options of the loss, in addition to the keys of this section
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    # old log-probs of the policy loss; trainer: the policy's before the first update of a step
    # (that update uses its own values for its rows; a separate pass computes the others); engine:
    # from the sampling engine (verl's bypass_mode)
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    clip_ratio_low: NonNegative = 0.2  # ppo: the ratio is clipped below 1 - clip_ratio_low
    clip_ratio_high: NonNegative = 0.2  # ppo: the ratio is clipped above 1 + clip_ratio_high
    clip_ratio_c: Annotated[float, Above(1)] | None = 3.0  # dual clip; null disables it
    # aggregation of a mini-batch's token losses; docs/algorithms.md compares the modes
    loss_agg_mode: Aggregation = "token-mean"
    # divisor of a sequence's sum for seq-mean-token-sum-norm (Dr.GRPO; verl:
    # data.max_response_length)
    loss_norm_tokens: PositiveInt = 1024
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    # apply the bonus only while the mean entropy of a step's sampled tokens (nats) is below this;
    # its coefficient starts at entropy_coef, and each step raises it by entropy_coef_step below the
    # target and lowers it above; null: fixed coefficient
    entropy_target: Positive | None = None
    entropy_coef_step: Positive = 0.005  # with entropy_target: change of the coefficient per step
    # step size of DeepSeek's loss-free balancing per update (published: 0.001); 0: biases are fixed
    expert_bias_update_rate: NonNegative = 0.0
    # coefficients of losses added for every layer with a router: load balancing over the real
    # tokens of a micro-batch (Switch, pre-training: 0.001 to 0.01), and the squared logsumexp of
    # the router's logits (ST-MoE, 0.001)
    router_aux_loss_coef: NonNegative = 0.0
    # coefficient of the z-loss on the router's logits; 0: off
    router_z_loss_coef: NonNegative = 0.0
    kl_loss_coef: NonNegative = 0.0  # 0, with algorithm.kl_coef 0: no reference pass
    kl_loss_type: KlLoss = "k3"  # per-token estimate of the KL divergence
    # multiply the estimate by the ratio of the policy to the sampling policy, so that its gradient
    # is that of the divergence (DeepSeek-V3.2; TRL's use_bias_correction_kl); with k1 and k3
    kl_loss_unbiased: bool = False
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    # further fields of Megatron's TransformerConfig, e.g. {moe_router_dtype: fp32}; rejected if
    # another key or config.json sets them, or if the job depends on its own value
    # (docs/parallelism.md) [megatron.override_transformer_config]
    megatron: dict[str, Any] = field(default_factory=dict)
    # experts used during updates; none: selected by the live router; compare: the same, and measure
    # how often the engine selected others; r2: from the old-log-prob pass; r3: from the engine, in
    # the old-log-prob pass and in updates
    router_replay: Literal["none", "compare", "r2", "r3"] = "none"
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class RoleConfig:
    """A model other than the policy: its weights and its processes."""

    path: str | None = None
    # colocated: in the actor's processes, with its layout; own: in separate processes
    placement: Placement = "colocated"
    procs: PositiveInt = 1  # own: total number of processes
    # own: share the devices of this section, taking turns; null: separate devices
    pool: Section | None = None
    # own, without `pool`: distribution of its devices over nodes; pack: on few nodes; spread:
    # evenly over all; whole_nodes: on few nodes that no other section uses
    packing: Packing = "pack"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # own: layout of its processes
    # packed tokens per forward pass of a data-parallel rank
    max_tokens_per_micro_batch: PositiveInt = 4096
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class ReferenceConfig(RoleConfig):
    """The reference model for KL terms, if any is used."""

    # own: HF folder of another model with the same vocabulary (a teacher); null: the policy at the
    # start of RL
    path: str | None = None
    # for `own`; a colocated reference uses actor.offload.weights
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class TeacherConfig(RoleConfig):
    """A model with the policy's vocabulary whose most likely tokens become columns of the batch,
    for `actor.distillation`. `path: null` disables it."""

    path: str | None = None  # HF folder of a causal model
    placement: Placement = "own"
    top_k: PositiveInt = 32  # most likely tokens recorded per response token


@dataclass(frozen=True)
class CriticConfig(RoleConfig):
    """A value model: like the policy, but with a scalar head. `critic` predicts rewards and is used
    if `algorithm.adv_estimator` needs it (gae); `cost_critic` predicts costs and is used if the
    flow calls it (safe_rlhf).
    """

    # HF folder (*ForTokenClassification, or a causal model: new head); null: the policy at the
    # start of RL
    path: str | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    # prompts per optimizer update (x rollout.n samples); null: actor.ppo_mini_batch_size
    ppo_mini_batch_size: PositiveInt | None = None
    ppo_epochs: PositiveInt = 1  # passes of the critic's updates over the samples of a step
    cliprange_value: Positive | None = 0.5  # maximum change of a value per update; null: unlimited
    # aggregation of the value losses of tokens, as for the actor
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"


@dataclass(frozen=True)
class RewardModelConfig(RoleConfig):
    """A trained model whose score of a prompt and response is added to the verifier's score. `path:
    null` disables it.
    """

    # HF folder (*ForSequenceClassification), as exported by `hybridflow train-reward`
    path: str | None = None
    weight: float = 1.0  # weight of its score in the reward
    # transformation of scores before weighting; standard: divided by their standard deviation in
    # the run so far
    squash: Literal["none", "sigmoid", "standard"] = "none"
    # standard: clip scores at this many standard deviations; null: no clipping
    clip: Positive | None = 5.0
    # it is trained in the run, by a flow that calls run.reward_model.update (learned_reward)
    trains: bool = False
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))


MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingConfig:
    """Token sampling for training. The trainer's log-probs account for truncation of the
    distribution (docs/algorithms.md).
    """

    # below 0.000001 engines take the most likely token, and the log-probabilities would not match
    temperature: Annotated[float, AtLeast(MIN_TEMPERATURE)] = 1.0
    # 1 disables it; in training it requires top_k
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    top_k: Annotated[int, AtLeast(-1)] = -1  # -1 disables it
    # exclude tokens less likely than this share of the most likely one; 0 disables it; in training
    # it requires top_k
    min_p: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    # penalties change logits based on earlier tokens: for validation only; 0, 0 and 1 disable them
    frequency_penalty: Annotated[float, AtLeast(-2), AtMost(2)] = 0.0
    # subtracted from the logits of tokens that have occurred
    presence_penalty: Annotated[float, AtLeast(-2), AtMost(2)] = 0.0
    # divides positive and multiplies negative logits of tokens that have occurred
    repetition_penalty: Annotated[float, Above(0), AtMost(2)] = 1.0
    # stop strings; an answer ends with the first match, which is part of it
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValSamplingConfig(SamplingConfig):
    """Token sampling for validation."""

    temperature: NonNegative = 0.0  # 0 takes the most likely token
    # maximum tokens of an answer; null: data.max_response_length
    max_new_tokens: PositiveInt | None = None


@dataclass(frozen=True)
class SyncConfig:
    """Transfer of new weights to the engines after a step. Each Megatron rank sends slices to each
    engine rank, in one transaction per engine."""

    # auto: on GPUs cuda_ipc for engines that share the trainer's devices and p2p for others, else
    # tcp
    transport: Annotated[str, TRANSPORT] = "auto"
    # staged: every rank receives everything before any rank applies it (needs memory for one more
    # shard); in_place: written on arrival; an engine whose transfer fails is excluded until the
    # next sync; null: in_place on GPUs, where memory is short, else staged
    commit: Literal["staged", "in_place"] | None = None
    # treatment of requests in flight; retract: they wait and their KV cache is recomputed; abort:
    # they end; in_place: they wait and keep the old KV cache
    pause: Literal["retract", "abort", "in_place"] = "retract"
    # memory per rank for messages in flight, shared by the engines it serves
    staging_bytes: PositiveInt = 256 << 20
    # deadline of each wait for a peer, a message or an engine's answer
    timeout_s: Positive = 120.0
    # retries within one sync for an engine whose transfer failed; 0: none until the next sync
    max_retries: NonNegativeInt = 1


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding with the model's own multi-token-prediction head, which is trained
    along with the policy and synced with it (docs/prediction-heads.md)."""

    # mtp: draft with the head, which needs actor.mtp.train; null: no drafts
    method: Literal["mtp"] | None = None
    num_steps: PositiveInt = 1  # tokens drafted one after another, before a pass verifies them


@dataclass(frozen=True)
class AgentConfig:
    """Conversations (docs/agents.md)."""

    # agent loop: single_turn, tools, environment, or your own, path/to/file.py:name
    loop: Annotated[str, AGENT_LOOP] = "single_turn"
    # environment of the loop `environment`
    environment: Annotated[str, ENVIRONMENT] | None = None
    # processes that host environments; null: one per core, at most 16
    environment_processes: PositiveInt | None = None
    # tools that the policy may call: built-in ones, and path/to/file.py:name
    tools: tuple[Annotated[str, TOOL], ...] = ()
    # options, keyed by tool name: {retrieval: {documents: docs/}}
    tool_options: dict[str, Any] = field(default_factory=dict)
    # Model Context Protocol servers, under names of your choice, whose tools are offered too:
    # {files: {command: [python, files.py]}} or {web: {url: "https://...", token_env: WEB_TOKEN}}
    # (docs/agents.md)
    mcp_servers: dict[str, Any] = field(default_factory=dict)
    call_format: Annotated[str, CALL_FORMAT] = "hermes"  # the model's format of tool calls
    # role of the messages with tool results
    observation_role: Literal["tool", "user"] = "tool"
    max_answers: PositiveInt = 8  # maximum answers (turns) per conversation
    # calls of one answer that run concurrently; further ones wait
    max_parallel_calls: PositiveInt = 16
    max_observation_tokens: PositiveInt = 1024  # tool results are truncated to this many tokens
    # deadline of a tool call, after which the policy is told that it timed out, and of an
    # environment step, after which its process is killed with all its episodes
    tool_timeout_s: Positive = 30.0
    # conversations without progress for this long, while no engine works for them, are aborted and
    # not trained on
    timeout_s: Positive = 300.0


@dataclass(frozen=True)
class RolloutConfig:
    """The engines and their sampling settings."""

    # kind of engine: a package of hybridflow.engines, or your own
    engine: Annotated[str, ENGINE] = "sglang"
    num_engines: PositiveInt = 1  # engines that share the prompts of a step
    tensor: PositiveInt = 1  # tensor parallel size of one engine
    pipeline: PositiveInt = 1  # pipeline stages of one engine; it has tensor x pipeline ranks
    # expert-parallel size within an engine's tensor ranks; must divide tensor
    expert: PositiveInt = 1
    # data-parallel copies of attention within an engine's tensor ranks; must divide tensor
    data_parallel_attention: PositiveInt = 1
    # nodes per engine, with one server each; in a local cluster all are on this machine
    nodes_per_engine: PositiveInt = 1
    # share the devices of this section, taking turns; null: separate devices
    pool: Section | None = None
    # without `pool`: distribution of the engines' devices over nodes; pack: on few nodes; spread:
    # evenly over all; whole_nodes: on few nodes that no other section uses
    packing: Packing = "pack"
    # null: weights in model.dtype; fp8: block-wise, quantized by the trainer (GPUs of capability
    # 8.9 or later)
    quantization: Literal["fp8"] | None = None
    n: PositiveInt = 1  # samples per prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    # answers per held-out prompt, for mean@k, best@k, pass@k and maj@k
    val_samples: PositiveInt = 1
    max_running_requests: PositiveInt = 64  # responses that an engine generates at a time
    max_total_tokens: PositiveInt = 16384  # KV cache of one engine
    # cuda: share of the device's memory for the engine's weights and KV cache
    mem_fraction_static: Annotated[float, Above(0), Below(1)] = 0.1
    # deadline for starting a single-rank engine; more ranks and weights extend it (`--explain`
    # shows by how much)
    start_timeout_s: Positive = 300.0
    # an engine that sends no token for this long while requests are in flight counts as hung
    request_timeout_s: Positive = 300.0
    # restarts of one engine per hour; then it is given up, and the others continue
    max_restarts: NonNegativeInt = 3
    sync: SyncConfig = field(default_factory=SyncConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    # stop if the mean |rollout - trainer| log-prob of a step exceeds this; null: never
    logprob_diff_bound: Positive | None = 0.01
    # minimum bound with model.dtype=bfloat16, since engine and trainer round differently
    logprob_diff_bound_bfloat16: Positive = 0.1
    # release the engines' device memory to the trainer (cuda only; on CPU engines keep theirs)
    sleep_while_training: bool = False
    # interpreter of the engine's server, with the kind's library (vllm); null: the interpreter of
    # this process
    python: str | None = None
    # additional arguments of the engine's own server, e.g. {chunked_prefill_size: 2048} (sglang);
    # arguments that affect sampling, weights or the data for the trainer are rejected
    extra_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyConfig:
    """An additional policy with separate engines, called by the flow as run.NAME (docs/flows.md).
    Missing keys fall back to the values in the run's main sections.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    # policy: its adapters are trained on the first policy's ranks and share that policy's frozen
    # weights (docs/lora.md); null: separate weights and ranks
    base: Literal["policy"] | None = None
    # total number of training processes; null: same as the first policy
    procs: PositiveInt | None = None
    # no gradients and no optimizer: the weights change only by run.NAME.take(policy)
    frozen: bool = False
    # prompts per step for its update (x rollout.n samples); null: data.train_batch_size
    train_batch_size: PositiveInt | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """Ray and the worker processes. The number of Megatron processes is nodes x procs_per_node."""

    # trainer and engine in the driver's process, without Ray (docs/debugging.md); use
    # cluster=in-process, which sets everything required
    in_process: bool = False
    # null: start a local cluster on loopback; else join (host:port or "auto")
    address: str | None = None
    nodes: PositiveInt = 1  # nodes with training ranks
    procs_per_node: PositiveInt = 1  # Megatron ranks per node (GPUs per node with cuda)
    # GPUs that each node must have; null: use GPUs if the cluster has any, whatever their number
    devices_per_node: PositiveInt | None = None
    # kind of device that `hybridflow plan` assumes, as in docs/planning.md; a run detects the
    # actual one
    device: str = "H100"
    # deadline for starting Ray and the ranks; more than eight ranks, and weights to load, extend it
    # (`--explain` shows by how much)
    start_timeout_s: Positive = 120.0
    call_timeout_s: Positive = 600.0  # deadline on any single worker call
    # declares that no other user can send to the machines of `address`. Otherwise Ray clusters
    # without a token and engines over several machines are rejected (docs/security.md)
    trusted_network: bool = False
    # shared memory for batches in a local cluster; the rest is spilled to disk
    object_store_bytes: Annotated[int, AtLeast(75 << 20)] = 256 << 20


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of single steps (docs/debugging.md)."""

    steps: tuple[PositiveInt, ...] = ()  # steps of the loop
    ranks: tuple[NonNegativeInt, ...] = (0,)  # of the actor
    # torch: a trace for each step and rank in the run folder's profile/; nsys: only marks the
    # capture range for `nsys profile --capture-range=cudaProfilerApi` (GPUs)
    tool: Literal["torch", "nsys"] = "torch"
    stacks: bool = False  # torch: with the Python stack of each operation
    memory: bool = False  # torch: with allocations


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop."""

    # null: from total_epochs, or 1 without it. An epoch is all rows of data.train_files once,
    # except those dropped as too long; a run of epochs ends after its last full batch. At most one
    # of the two may be set
    total_steps: PositiveInt | None = None
    # length of the run in passes over the data; see total_steps
    total_epochs: PositiveInt | None = None
    # maximum weight versions that the oldest token of a step may be behind; 0: a step waits for all
    # its prompts; 1: it trains while engines generate the next step's; more: fully asynchronous
    # (docs/asynchronous.md)
    max_staleness: NonNegativeInt = 0
    # prefetch depth in steps; null: adapted to the generation time, up to max_staleness, so that
    # samples are as fresh as possible
    steps_ahead: NonNegativeInt | None = None
    # tail batching (RollPacker): a step submits this share of additional prompts and trains those
    # whose samples finish first; the others are regenerated in a separate step. 0: off
    # (docs/asynchronous.md)
    tail_batching: NonNegative = 0.0
    critic_warmup: NonNegativeInt = 0  # first steps in which only the critic is trained
    val_before_train: bool = True  # answer the held-out prompts before the first step
    test_every_steps: NonNegativeInt = 0  # 0: only before and after training
    save_every_steps: NonNegativeInt = 0  # 0: only at the end
    max_checkpoints_to_keep: NonNegativeInt = 2  # keep the newest N checkpoints; 0 keeps all
    # also keep checkpoints whose step is a multiple of this; 0: none
    keep_checkpoint_every_steps: NonNegativeInt = 0
    # training stops only while the state is copied; it is written in the background
    async_checkpoints: bool = True
    checkpoint_timeout_s: Positive = 1800.0  # deadline of a background save
    # auto: go on from the last checkpoint of the run folder; disable: start anew
    resume: Literal["auto", "disable"] = "auto"
    # allow resuming from a checkpoint that was trained on other rows, starting with the first of
    # the new rows; rejected otherwise
    resume_with_other_data: bool = False
    # restarts per hour if ranks are lost in the loop: of training ranks, which continue from the
    # last checkpoint; of each role that only computes, within the step; of all engines, if none is
    # left. 0: the job ends
    max_restarts: NonNegativeInt = 1
    export: bool = True  # write a Hugging Face folder at the end
    # console, jsonl, tensorboard, wandb, mlflow, trackio or path/to/file.py:name (docs/trackers.md)
    loggers: tuple[Annotated[str, TRACKER], ...] = ("console", "jsonl", "tensorboard")
    project: str = "hybridflow"  # the project of wandb and trackio, mlflow's experiment
    group: str | None = None  # groups runs in these trackers
    # rows of each sample table sent to them; 0: neither samples nor distributions
    tracked_samples: NonNegativeInt = 8
    # seconds that a tracker may need after the end of the run; records it lacks then are lost
    tracker_timeout_s: Positive = 60.0
    # serve the latest metrics to Prometheus on this port of 127.0.0.1; null: do not
    prometheus_port: Annotated[int, AtLeast(1), AtMost(65535)] | None = None
    dump_rollouts_every_steps: NonNegativeInt = 1  # parquet; 0: never
    # keep the dumps of the newest N dumped steps, of each policy; null: all. Validation answers
    # stay
    keep_rollout_steps: PositiveInt | None = None
    # with keep_rollout_steps, also keep dumps whose step is a multiple of this; 0: none
    keep_rollouts_every_steps: NonNegativeInt = 0
    # generate, score and dump without training: the weights stay as at the start
    # (docs/debugging.md)
    rollout_only: bool = False
    # train on these dumps instead of generating, without engines: a run's rollouts folder, or the
    # file of one step; the run ends after the last one
    rollouts_from: str | None = None
    report: bool = True  # write report.html at the end
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run. `hybridflow train`, `sft` and `train-reward` use the same
    file.
    """

    name: str = "run"  # name of the run and of its folder
    # each engine adds its number; limited to 32 bits
    seed: Annotated[int, AtLeast(0), AtMost(4_000_000_000)] = 1
    output_dir: str = "runs"  # the run folder is output_dir/name
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cost_critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    # additional trained policies, keyed by name: {tester: {model: {path: ...}, procs: 2}}
    roles: dict[str, PolicyConfig] = field(default_factory=dict)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_training: RewardTrainingConfig = field(default_factory=RewardTrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
