"""Every configuration key, its type, default and meaning. Frozen: nothing rewrites a configuration
once it is built.

Units are part of the name (`_s` seconds, `_tokens`, `_steps`) or said in the comment. "prompts"
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
Section = Literal["actor", "critic", "reference", "reward_model", "teacher", "rollout"]
Packing = Literal["pack", "spread", "whole_nodes"]
LoraTarget = Literal[
    "linear_qkv",  # query, key and value
    "linear_q_proj",  # query of latent attention without a query latent
    "linear_q_down_proj",  # query latent
    "linear_q_up_proj",  # query out of its latent
    "linear_kv_down_proj",  # key and value latent
    "linear_kv_up_proj",  # key and value out of their latent
    "linear_proj",  # output of attention
    "linear_fc1",  # gate and up of dense MLPs and shared experts
    "linear_fc2",  # down of dense MLPs and shared experts
]


@dataclass(frozen=True)
class ModelConfig:
    """The policy: `path` (a Hugging Face folder with weights), or without it `hf_config` (random
    initialisation)."""

    path: str | None = None
    # fields of a HF config.json; model_type decides the family. With `path`: the sizes that its
    # config.json must have
    hf_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # HF tokenizer folder; null: `path`
    # a parameter map of your own, path/to/file.py:MODEL_TYPE; null: a built-in one
    family: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the device (on CPU: this process's memory) while it is not needed, and comes back
    byte for byte."""

    # while the engines generate (critic, reward model: whenever idle); the reference's whenever it
    # does not compute
    weights: bool = False
    gradients: bool = False  # outside of updates
    optimizer: bool = False  # outside of updates


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank adapters in place of the weights: W + alpha / rank * B A, with W frozen
    (docs/lora.md)."""

    rank: NonNegativeInt = 0  # 0: off, all weights are trained
    alpha: Positive = 32.0  # strength: adapters count alpha / rank
    # Megatron's names of the adapted linears, e.g. [linear_qkv, linear_proj]; empty: all but routed
    # experts
    targets: tuple[LoraTarget, ...] = ()
    # must be 0: with it an update would train another policy than the one that was scored
    dropout: float = 0.0


@dataclass(frozen=True)
class ActorConfig:
    """The trained policy: layout, optimizer and PPO update."""

    # megatron: every parallelism, dense and mixture of experts; fsdp: FSDP2 over transformers'
    # dense models, every process a data-parallel rank
    backend: Literal["megatron", "fsdp"] = "megatron"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    ppo_mini_batch_size: PositiveInt = 64  # prompts an optimizer update (x rollout.n samples)
    ppo_epochs: PositiveInt = 1
    # packed tokens in one forward pass of a data-parallel rank (all its context ranks together)
    max_tokens_per_micro_batch: PositiveInt = 4096
    # response tokens whose logits exist at a time, forward and backward
    logits_chunk_tokens: PositiveInt = 1024
    # activations computed again in the backward pass: none, some modules (selective) or whole
    # layers (full)
    recompute: Literal["none", "selective", "full"] = "none"
    # what selective computes again; docs/parallelism.md says what each is and which models have it
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    # what to do with an update whose loss or gradient is NaN or infinite
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # CONTRIBUTING.md says what a loss of yours holds; verl's bypass_mode is
    # actor.old_log_probs=engine with ppo or reinforce
    policy_loss: Annotated[str, POLICY_LOSS, _VERL_LOSSES] = "ppo"
    # of the loss, besides the keys of this section
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    # what updates compare with; trainer: the policy's log-probs before the first update of a step
    # (for the rows of that update its own values; a pass computes those of the other rows); engine:
    # those of the engine that sampled (verl's bypass_mode)
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    clip_ratio_low: NonNegative = 0.2
    clip_ratio_high: NonNegative = 0.2
    clip_ratio_c: Annotated[float, Above(1)] | None = 3.0  # dual clip; null switches it off
    # how the losses of a mini-batch's tokens become one number; docs/algorithms.md compares the
    # modes
    loss_agg_mode: Aggregation = "token-mean"
    # what seq-mean-token-sum-norm divides a sequence's sum by (Dr.GRPO; verl:
    # data.max_response_length)
    loss_norm_tokens: PositiveInt = 1024
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    entropy_coef: float = 0.0  # of the entropy bonus
    # the bonus counts while the mean entropy of a step's sampled tokens (nats) is below this;
    # entropy_coef is where its coefficient starts, which each step moves up by entropy_coef_step
    # below it and down beyond; null: it is fixed
    entropy_target: Positive | None = None
    entropy_coef_step: Positive = 0.005
    # a step of DeepSeek's loss-free balancing an update (published: 0.001); 0: biases stay
    expert_bias_update_rate: NonNegative = 0.0
    # added to the loss for every layer with routers: load balancing over the real tokens of a
    # micro-batch (Switch, pre-training: 0.001 to 0.01) and the squared logsumexp of the routers'
    # logits (ST-MoE, 0.001)
    router_aux_loss_coef: NonNegative = 0.0
    router_z_loss_coef: NonNegative = 0.0
    kl_loss_coef: NonNegative = 0.0  # 0 with algorithm.kl_coef 0: no reference pass at all
    kl_loss_type: KlLoss = "k3"  # estimate of the KL divergence at each token
    # multiply the estimate by the ratio of the policy to what sampled, so that its gradient is the
    # divergence's (DeepSeek-V3.2; TRL's use_bias_correction_kl); with k1 and k3
    kl_loss_unbiased: bool = False
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    # which experts the tokens of an update go through; none: those the live router chooses;
    # compare: the same, and how often the engine chose otherwise is measured; r2: those of the
    # old-log-prob pass; r3: those the engine used, in the old-log-prob pass and in updates
    router_replay: Literal["none", "compare", "r2", "r3"] = "none"
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class RoleConfig:
    """A model other than the policy: where it comes from and which processes hold it."""

    path: str | None = None
    # colocated: in the actor's processes, in its layout; own: in processes of its own
    placement: Placement = "colocated"
    procs: PositiveInt = 1  # own: processes, in all
    # own: use the devices of this section, in turns with it; null: devices of its own
    pool: Section | None = None
    # own, without `pool`: how its devices lie on the nodes; pack: on few; spread: evenly over all;
    # whole_nodes: on few that no other section uses
    packing: Packing = "pack"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # own: their layout
    # packed tokens in one forward pass of a data-parallel rank
    max_tokens_per_micro_batch: PositiveInt = 4096
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class ReferenceConfig(RoleConfig):
    """The model that KL terms compare the policy with, where one of them is in use."""

    # own: HF folder of another model of the same vocabulary (a teacher); null: the policy as RL
    # begins
    path: str | None = None
    # own; colocated, actor.offload.weights counts
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class TeacherConfig(RoleConfig):
    """A model of the policy's vocabulary, whose most likely tokens become columns of the batch, for
    `actor.distillation`. `path: null`: none."""

    path: str | None = None  # HF folder of a causal model
    placement: Placement = "own"
    top_k: PositiveInt = 32  # tokens at every response token


@dataclass(frozen=True)
class CriticConfig(RoleConfig):
    """The value model, where `algorithm.adv_estimator` needs one (gae): as the policy, with a
    scalar head."""

    # HF folder (*ForTokenClassification, or a causal model: fresh head); null: the policy as RL
    # begins
    path: str | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    # prompts an optimizer update (x rollout.n samples); null: actor.ppo_mini_batch_size
    ppo_mini_batch_size: PositiveInt | None = None
    ppo_epochs: PositiveInt = 1
    cliprange_value: Positive | None = 0.5  # how far an update may move a value; null: anywhere
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"


@dataclass(frozen=True)
class RewardModelConfig(RoleConfig):
    """A trained model that scores prompt and response, added to the verifier's score. `path: null`:
    none."""

    # HF folder (*ForSequenceClassification), as `hybridflow train-reward` exports it
    path: str | None = None
    weight: float = 1.0  # of its score in the reward
    # what is done to scores before they are weighted; standard: divided by their spread in the run
    # so far
    squash: Literal["none", "sigmoid", "standard"] = "none"
    # standard: no score counts more than so many standard deviations; null: no bound
    clip: Positive | None = 5.0


MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SamplingConfig:
    """Token sampling for training. What cuts the distribution enters the trainer's log-probs
    (docs/algorithms.md)."""

    # engines take the most likely token below 0.000001, and the log-probabilities would be others
    temperature: Annotated[float, AtLeast(MIN_TEMPERATURE)] = 1.0
    # 1 switches it off; in training it needs a top_k
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    top_k: Annotated[int, AtLeast(-1)] = -1  # -1 switches it off
    # leave out tokens less likely than this share of the most likely one; 0 switches it off; in
    # training it needs a top_k
    min_p: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    # penalties change logits by the tokens before: for validation alone; 0, 0 and 1 switch them off
    frequency_penalty: Annotated[float, AtLeast(-2), AtMost(2)] = 0.0
    presence_penalty: Annotated[float, AtLeast(-2), AtMost(2)] = 0.0
    repetition_penalty: Annotated[float, Above(0), AtMost(2)] = 1.0
    # an answer ends behind the first of these texts, which is part of it
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValSamplingConfig(SamplingConfig):
    """Token sampling for validation."""

    temperature: NonNegative = 0.0  # 0 takes the most likely token
    max_new_tokens: PositiveInt | None = None  # tokens of an answer; null: data.max_response_length


@dataclass(frozen=True)
class SyncConfig:
    """How new weights reach the engines after a step: slices from each Megatron rank to each engine
    rank, one transaction an engine."""

    # auto: with GPUs cuda_ipc where engines use those of the trainer and p2p elsewhere, else tcp
    transport: Annotated[str, TRANSPORT] = "auto"
    # staged: every rank has everything before any copies (one more shard of memory); in_place:
    # written as it comes, and an engine whose transfer fails is left out until the next; null:
    # in_place on GPUs, where memory is short, else staged
    commit: Literal["staged", "in_place"] | None = None
    # what happens to requests in flight; retract: they wait and their KV cache is made anew; abort:
    # they end; in_place: they wait and keep the old KV cache
    pause: Literal["retract", "abort", "in_place"] = "retract"
    # memory of a rank for messages under way, shared by the engines it serves
    staging_bytes: PositiveInt = 256 << 20
    # deadline of any one wait: for a peer, a message, an answer of an engine
    timeout_s: Positive = 120.0
    # further attempts within one sync at an engine whose transfer failed; 0: none until the next
    # sync
    max_retries: NonNegativeInt = 1


@dataclass(frozen=True)
class AgentConfig:
    """How a prompt becomes a conversation (docs/agents.md)."""

    # what happens between the answers: single_turn, tools, environment, or one of yours,
    # path/to/file.py:name
    loop: Annotated[str, AGENT_LOOP] = "single_turn"
    # takes the answers of the loop `environment`
    environment: Annotated[str, ENVIRONMENT] | None = None
    # processes that hold environments; null: one a core, at most 16
    environment_processes: PositiveInt | None = None
    # what the policy may call: built-in ones, and path/to/file.py:name
    tools: tuple[Annotated[str, TOOL], ...] = ()
    # by the tool's name: {retrieval: {documents: docs/}}
    tool_options: dict[str, Any] = field(default_factory=dict)
    # servers of the Model Context Protocol, by names of yours; their tools are offered as well:
    # {files: {command: [python, files.py]}} or {web: {url: "https://...", token_env: WEB_TOKEN}}
    # (docs/agents.md)
    mcp_servers: dict[str, Any] = field(default_factory=dict)
    call_format: Annotated[str, CALL_FORMAT] = "hermes"  # how the model writes a call
    # of the messages that show what a tool returned
    observation_role: Literal["tool", "user"] = "tool"
    max_answers: PositiveInt = 8  # turns: answers in a conversation
    # calls of one answer that run at the same time; further ones wait
    max_parallel_calls: PositiveInt = 16
    max_observation_tokens: PositiveInt = 1024  # what a tool returns is cut to so many tokens
    # of a call, and the policy is then told that it did not answer; of a step of an environment,
    # whose process is then ended with all its episodes
    tool_timeout_s: Positive = 30.0
    # conversations that do nothing for so long, while no engine works for them, are ended and not
    # trained on
    timeout_s: Positive = 300.0


@dataclass(frozen=True)
class RolloutConfig:
    """The engines and how they sample."""

    # kind of engine: a package of hybridflow.engines, or one of yours
    engine: Annotated[str, ENGINE] = "sglang"
    num_engines: PositiveInt = 1
    tensor: PositiveInt = 1  # tensor parallel size of one engine
    pipeline: PositiveInt = 1  # pipeline stages of one engine; it has tensor x pipeline ranks
    # groups into which an engine's tensor ranks divide the experts; divides tensor
    expert: PositiveInt = 1
    # copies of the attention that an engine's tensor ranks hold; divides tensor
    data_parallel_attention: PositiveInt = 1
    # nodes that an engine's ranks are divided over, a server each; in a local cluster all on this
    # machine
    nodes_per_engine: PositiveInt = 1
    # use the devices of this section, in turns with it; null: devices of their own
    pool: Section | None = None
    # without `pool`: how the engines' devices lie on the nodes; pack: on few; spread: evenly over
    # all; whole_nodes: on few that no other section uses
    packing: Packing = "pack"
    # null: weights in model.dtype; fp8: block-wise, made by the trainer (GPUs of capability 8.9 or
    # later)
    quantization: Literal["fp8"] | None = None
    n: PositiveInt = 1  # samples a prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    # answers to each held-out prompt: mean@k, best@k, pass@k and maj@k are measured
    val_samples: PositiveInt = 1
    max_running_requests: PositiveInt = 64
    max_total_tokens: PositiveInt = 16384  # KV cache of one engine
    mem_fraction_static: Annotated[float, Above(0), Below(1)] = 0.1
    # of an engine's start, of one rank; ranks and weights add to it (`--explain` says how much)
    start_timeout_s: Positive = 300.0
    # an engine that was asked and sends no token for so long hangs
    request_timeout_s: Positive = 300.0
    # of one engine within an hour; then it is given up, and the others go on
    max_restarts: NonNegativeInt = 3
    sync: SyncConfig = field(default_factory=SyncConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    # stop when mean |rollout - trainer| log-prob of a step exceeds it; null: never
    logprob_diff_bound: Positive | None = 0.01
    # with model.dtype=bfloat16 the bound is at least this: engine and trainer round in other places
    logprob_diff_bound_bfloat16: Positive = 0.1
    # give the engines' device memory to the trainer (cuda; on CPU engines keep theirs)
    sleep_while_training: bool = False
    # interpreter of the engine's server, with the kind's library (vllm); null: the one of this
    # process
    python: str | None = None
    # more arguments of the engine's own server, e.g. {chunked_prefill_size: 2048} (sglang); those
    # that change what is sampled, by which weights, or what reaches the trainer are refused
    extra_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterConfig:
    """Ray and the worker processes. The number of Megatron processes is nodes x procs_per_node."""

    # trainer and engine in the driver's process, without Ray (docs/debugging.md);
    # cluster=in-process sets what it needs
    in_process: bool = False
    # null: start a local cluster on loopback; else join (host:port or "auto")
    address: str | None = None
    nodes: PositiveInt = 1
    procs_per_node: PositiveInt = 1  # Megatron ranks a node (GPUs a node on the cuda lane)
    # GPUs that a node must have; null: GPUs are used where the cluster has any, however many
    devices_per_node: PositiveInt | None = None
    # kind of device that `hybridflow plan` counts with, as in docs/planning.md; a run asks the
    # machines
    device: str = "H100"
    # of the start of Ray and of ranks; more than eight ranks, and weights to be read, add to it
    # (`--explain` says how much)
    start_timeout_s: Positive = 120.0
    call_timeout_s: Positive = 600.0  # deadline on any single worker call
    # nobody else can send to the machines of `address`. Without it a Ray without a token and
    # engines over several machines are refused (docs/security.md)
    trusted_network: bool = False
    # shared memory for batches in a local cluster; what does not fit is spilled to the disk
    object_store_bytes: Annotated[int, AtLeast(75 << 20)] = 256 << 20


@dataclass(frozen=True)
class TrainerConfig:
    """The loop."""

    # null: as many as total_epochs says, and 1 without it. An epoch is all rows of data.train_files
    # once, of those that are not dropped as too long; a run of epochs ends after the last whole
    # batch of them. One of the two may be given
    total_steps: PositiveInt | None = None
    total_epochs: PositiveInt | None = None
    # how many weight versions the oldest token of a step may be behind; 0: a step waits for all
    # prompts that it hands out; 1: it trains while engines answer those of the next; more: fully
    # asynchronous (docs/asynchronous.md)
    max_staleness: NonNegativeInt = 0
    # for how many steps prompts are handed out before the one that trains; null: for as many, up to
    # max_staleness, as answers take, so that samples are as young as can be
    steps_ahead: NonNegativeInt | None = None
    # tail batching (RollPacker): a step hands out so many more prompts, as a share of its own, and
    # trains those whose samples end first; the others are answered anew in a step of their own. 0:
    # never (docs/asynchronous.md)
    tail_batching: NonNegative = 0.0
    critic_warmup: NonNegativeInt = 0  # first steps in which the critic alone is trained
    val_before_train: bool = True
    test_every_steps: NonNegativeInt = 0  # 0: only before and after
    save_every_steps: NonNegativeInt = 0  # 0: only at the end
    max_checkpoints_to_keep: NonNegativeInt = 2  # the newest so many; 0: all
    # checkpoints whose step is a multiple of it are kept as well; 0: none
    keep_checkpoint_every_steps: NonNegativeInt = 0
    # training stops for a copy of the state only; it is written meanwhile
    async_checkpoints: bool = True
    checkpoint_timeout_s: Positive = 1800.0  # a save in the background must be on the disk by then
    resume: Literal["auto", "disable"] = "auto"
    # go on from a checkpoint that was trained on other rows, with these from the first on; without
    # it that is refused
    resume_with_other_data: bool = False
    # within an hour, when ranks are lost in the loop: of those that train, which go on from the
    # last checkpoint; of each role that only computes, within the step; of all engines when none is
    # left that could answer. 0: the job ends
    max_restarts: NonNegativeInt = 1
    export: bool = True  # write a Hugging Face folder at the end
    loggers: tuple[Annotated[str, TRACKER], ...] = ("console", "jsonl", "tensorboard")
    dump_rollouts_every_steps: NonNegativeInt = 1  # parquet; 0: never
    # generate, score and dump, without training: the weights stay those that the run begins with
    # (docs/debugging.md)
    rollout_only: bool = False
    # train on these dumps instead of generating, without engines: the folder of a run's rollouts,
    # or the file of one step; the run ends after the last of them
    rollouts_from: str | None = None
    report: bool = True


@dataclass(frozen=True)
class RunConfig:
    """One run: `hybridflow train` and `hybridflow sft` read the same file."""

    name: str = "run"
    # an engine adds its number, and takes 32 bits
    seed: Annotated[int, AtLeast(0), AtMost(4_000_000_000)] = 1
    output_dir: str = "runs"  # the run folder is output_dir/name
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_training: RewardTrainingConfig = field(default_factory=RewardTrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
