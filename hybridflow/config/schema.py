"""Every configuration key, its type, default and meaning. Frozen: nothing rewrites a configuration once it is built.

Units are part of the name (`_s` seconds, `_tokens`, `_steps`) or said in the comment. "prompts" counts rows of the
dataset, "samples" counts generated responses: samples = prompts x `rollout.n`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PrepareConfig:
    """Dataset preparation that runs before training when its output is missing. `task: null` skips it."""

    task: str | None = None  # arithmetic | gsm8k; the same names as `hybridflow prepare`
    source: str | None = None  # folder of raw files, for tasks that need one
    out: str = "data"  # folder that receives train.parquet, test.parquet, [sft.parquet], tokenizer/
    options: dict[str, Any] = field(default_factory=dict)  # task specific, e.g. {num_train: 4000}


@dataclass(frozen=True)
class DatasetClassConfig:
    """A dataset class of yours in place of `PromptDataset`; `hybridflow.data.custom.Prompts` says what it must have."""

    path: str | None = None  # python file; None: the built-in class
    name: str = "Dataset"


@dataclass(frozen=True)
class DataConfig:
    """Prompts: parquet rows {data_source, prompt, ability, reward_model{style, ground_truth}, extra_info}."""

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    prompt_key: str = "prompt"
    train_batch_size: int = 64  # prompts a step
    val_max_prompts: int | None = None  # None: all of them
    max_prompt_length: int = 512  # tokens, after the chat template
    max_response_length: int = 512  # tokens
    filter_overlong_prompts: bool = False  # drop prompts longer than max_prompt_length instead of refusing to start
    truncation: str = "error"  # error | left | right | middle, when a prompt is too long and not filtered
    shuffle: bool = True
    weight_key: str | None = (
        None  # key of extra_info: how often a row comes, relative to others; None: every row once an epoch
    )
    difficulty_key: str | None = (
        None  # key of extra_info: each epoch goes from small values to large ones; None: no curriculum
    )
    dataset_class: DatasetClassConfig = field(default_factory=DatasetClassConfig)


@dataclass(frozen=True)
class ModelConfig:
    """The policy. Either `path` (a Hugging Face folder with weights) or `hf_config` (random initialisation)."""

    path: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)  # fields of a HF config.json; model_type decides the family
    tokenizer: str | None = None  # HF tokenizer folder; None: `path`
    family: str | None = None  # a parameter map of your own, path/to/file.py:MODEL_TYPE; None: one of the built-in ones
    dtype: str = "float32"  # float32 | bfloat16


@dataclass(frozen=True)
class ParallelConfig:
    """Megatron parallel sizes (verl's names in brackets). docs/parallelism.md says which combinations are legal."""

    tensor: int = 1  # [tensor_model_parallel_size]
    pipeline: int = 1  # [pipeline_model_parallel_size]
    virtual_pipeline: int | None = None  # model chunks a pipeline rank holds, interleaved; None: 1
    context: int = 1  # ranks that share each sequence (zigzag); a sequence is padded to a multiple of 2 x context
    expert: int = 1
    expert_tensor: int | None = None  # None: 1 when expert > 1, else `tensor`
    sequence: bool = False  # sequence parallelism; needs tensor > 1
    distributed_optimizer: bool = True  # main weights and moments are split over data-parallel ranks
    overlap_grad_reduce: bool = False  # reduce gradients over data-parallel ranks during the backward pass
    overlap_param_gather: bool = (
        False  # gather updated weights during the next forward pass; needs distributed_optimizer
    )
    moe_dispatcher: str = "alltoall"  # alltoall | allgather: how tokens reach their experts


@dataclass(frozen=True)
class OptimConfig:
    """AdamW as Megatron builds it."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: str = "constant"  # constant | linear | cosine
    lr_warmup_steps: int = 0  # optimizer updates
    lr_decay_steps: int | None = None  # optimizer updates; needed by linear and cosine
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the device (on CPU: this process's memory) while it is not needed, and comes back byte for byte."""

    # while the engines generate (critic, reward model: whenever idle); the reference's whenever it does not compute
    weights: bool = False
    gradients: bool = False  # outside of updates
    optimizer: bool = False  # outside of updates


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank adapters in place of the weights: W + alpha / rank * B A, with W frozen (docs/lora.md)."""

    rank: int = 0  # 0: off, all weights are trained
    alpha: float = 32.0  # strength: adapters count alpha / rank
    targets: tuple[
        str, ...
    ] = ()  # Megatron's names of the adapted linears, e.g. [linear_qkv, linear_proj]; empty: all but routed experts
    dropout: float = 0.0  # must be 0: with it an update would train another policy than the one that was scored


@dataclass(frozen=True)
class ActorConfig:
    """The trained policy: layout, optimizer and PPO update."""

    backend: str = (
        "megatron"  # megatron | fsdp: FSDP2 over transformers' dense models, every process a data-parallel rank
    )
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    ppo_mini_batch_size: int = 64  # prompts an optimizer update (x rollout.n samples)
    ppo_epochs: int = 1
    max_tokens_per_micro_batch: int = (
        4096  # packed tokens in one forward pass of a data-parallel rank (all its context ranks together)
    )
    logits_chunk_tokens: int = 1024  # response tokens whose logits exist at a time, forward and backward
    # none | selective | full: activations computed again in the backward pass (attention's core, or whole layers)
    recompute: str = "none"
    on_nonfinite: str = "stop"  # stop | skip: what to do with an update whose loss or gradient is NaN or infinite
    policy_loss: str = "ppo"  # a name, or path/to/file.py:name (CONTRIBUTING.md says what it holds)
    policy_loss_options: dict[str, Any] = field(default_factory=dict)  # of the loss, besides the keys of this section
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0  # dual clip; None switches it off
    loss_agg_mode: str = "token-mean"  # token-mean | seq-mean-token-sum | seq-mean-token-mean
    entropy_coef: float = 0.0
    expert_bias_update_rate: float = (
        0.0  # a step of DeepSeek's loss-free balancing an update (published: 0.001); 0: biases stay
    )
    kl_loss_coef: float = 0.0  # 0 with algorithm.kl_coef 0: no reference pass at all
    kl_loss_type: str = "k3"  # k1 | abs | k2 | k3
    router_replay: str = "none"  # none | compare | r2 | r3: which experts the tokens of an update go through
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class ReferenceConfig:
    """The model that KL terms compare the policy with, where one of them is in use."""

    placement: str = "colocated"  # colocated: the actor's processes, weights swapped in | own: processes of its own
    path: str | None = (
        None  # own: HF folder of another model of the same vocabulary (a teacher); None: the policy as RL begins
    )
    procs: int = 1  # own: processes, in all
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # own: their layout
    max_tokens_per_micro_batch: int = 4096
    offload: OffloadConfig = field(default_factory=OffloadConfig)  # own; colocated, actor.offload.weights counts


@dataclass(frozen=True)
class TeacherConfig:
    """A model of the policy's vocabulary, whose most likely tokens become columns of the batch. `path: null`: none."""

    path: str | None = None  # HF folder of a causal model
    placement: str = "own"  # own: processes of its own | colocated: in the actor's processes, in its layout
    procs: int = 1  # own: processes, in all
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # own: their layout
    max_tokens_per_micro_batch: int = 4096
    top_k: int = 32  # tokens at every response token
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class CriticConfig:
    """The value model, where `algorithm.adv_estimator` needs one (gae): as the policy, with a scalar head."""

    path: str | None = (
        None  # HF folder (*ForTokenClassification, or a causal model: fresh head); None: the policy as RL begins
    )
    placement: str = "colocated"  # colocated: in the actor's processes, in its layout | own: processes of its own
    procs: int = 1  # own: processes, in all
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # own: their layout
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    ppo_mini_batch_size: int | None = (
        None  # prompts an optimizer update (x rollout.n samples); None: actor.ppo_mini_batch_size
    )
    ppo_epochs: int = 1
    max_tokens_per_micro_batch: int = 4096  # packed tokens in one forward pass of a data-parallel rank
    cliprange_value: float | None = 0.5  # how far an update may move a value; None: anywhere
    loss_agg_mode: str = "token-mean"  # token-mean | seq-mean-token-sum | seq-mean-token-mean
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class RewardModelConfig:
    """A trained model that scores prompt and response, added to the verifier's score. `path: null`: none."""

    path: str | None = None  # HF folder (*ForSequenceClassification), as `hybridflow train-reward` exports it
    placement: str = "colocated"  # colocated: in the actor's processes, in its layout | own: processes of its own
    procs: int = 1  # own: processes, in all
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # own: their layout
    max_tokens_per_micro_batch: int = 4096
    weight: float = 1.0  # of its score in the reward
    # none | sigmoid | standard (over their spread in the run so far): what is done to scores before they are weighted
    squash: str = "none"
    clip: float | None = 5.0  # standard: no score counts more than so many standard deviations; None: no bound
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class RewardTrainingConfig:
    """`hybridflow train-reward`: a reward model from preference pairs, parquet rows {prompt, chosen, rejected}."""

    steps: int = 0
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()  # held-out pairs, for the accuracy at the end
    batch_size: int = 64  # pairs a step
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))


@dataclass(frozen=True)
class AlgorithmConfig:
    """How rewards become advantages."""

    # grpo: compared within a prompt's samples | gae: against a critic's values (PPO) | path/to/file.py:name
    adv_estimator: str = "grpo"
    adv_estimator_options: dict[str, Any] = field(default_factory=dict)  # of it, besides the keys of this section
    norm_adv_by_std: bool = True  # grpo; False: Dr.GRPO
    gamma: float = 1.0  # gae: discount of a token
    lam: float = 1.0  # gae: 1 sums the rewards to go, 0 looks one token ahead
    kl_coef: float = 0.0  # KL penalty inside the reward
    kl_penalty: str = "k1"  # k1 | abs | k2 | k3: its estimate at each token
    kl_target: float | None = None  # steer kl_coef towards this mean KL of a token; None: kl_coef is fixed
    kl_horizon: int = 10000  # samples over which the steering takes effect


@dataclass(frozen=True)
class SamplingConfig:
    """Token sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off


@dataclass(frozen=True)
class SyncConfig:
    """How new weights reach the engines after a step: slices from each Megatron rank to each engine rank, one
    transaction an engine."""

    transport: str = (
        "auto"  # auto (p2p with GPUs, else tcp) | p2p | tcp (no GPUs) | shared_memory (one machine, no GPUs) | disk
    )
    # staged: every rank has everything before any copies (one more shard of memory); in_place: written as it comes
    commit: str = "staged"
    # requests under way: retract (wait, KV cache made anew) | abort (end) | in_place (wait, keep the old KV cache)
    pause: str = "retract"
    staging_bytes: int = 256 << 20  # memory of a rank for messages under way, shared by the engines it serves
    timeout_s: float = 120.0  # deadline of any one wait: for a peer, a message, an answer of an engine
    max_retries: int = (
        1  # further attempts within one sync at an engine whose transfer failed; 0: none until the next sync
    )


@dataclass(frozen=True)
class RolloutConfig:
    """The engines and how they sample."""

    engine: str = "sglang"  # kind of engine: a package of hybridflow.engines, or path/to/file.py:name
    num_engines: int = 1
    tensor: int = 1  # tensor parallel size of one engine
    pipeline: int = 1  # pipeline stages of one engine; it has tensor x pipeline ranks
    expert: int = 1  # groups into which an engine's tensor ranks divide the experts; divides tensor
    data_parallel_attention: int = 1  # copies of the attention that an engine's tensor ranks hold; divides tensor
    nodes_per_engine: int = (
        1  # nodes that an engine's ranks are divided over, a server each; in a local cluster all on this machine
    )
    quantization: str | None = (
        None  # null: weights in model.dtype | fp8: block-wise, made by the trainer (GPUs of capability 8.9 or later)
    )
    n: int = 1  # samples a prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_running_requests: int = 64
    max_total_tokens: int = 16384  # KV cache of one engine
    mem_fraction_static: float = 0.1
    start_timeout_s: float = 300.0
    request_timeout_s: float = 300.0
    max_restarts: int = 3  # of one engine within an hour; then it is given up, and the others go on
    sync: SyncConfig = field(default_factory=SyncConfig)
    logprob_diff_bound: float | None = (
        0.01  # stop when mean |rollout - trainer| log-prob of a step exceeds it; None: never
    )
    sleep_while_training: bool = (
        False  # give the engines' device memory to the trainer (cuda; on CPU engines keep theirs)
    )
    # more arguments of the engine's own server, e.g. {chunked_prefill_size: 2048} (sglang)
    extra_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardConfig:
    """Where the score of a response comes from: a built-in verifier by data_source, or a function of yours."""

    path: str | None = None  # python file; None: built-in verifiers
    name: str = (
        "compute_score"  # compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict
    )
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # of this score in the reward; validation counts the score itself


@dataclass(frozen=True)
class SftConfig:
    """Supervised warm start on parquet rows {prompt, response}. `steps: 0` skips it."""

    steps: int = 0
    train_files: tuple[str, ...] = ()
    batch_size: int = 64  # sequences a step
    response_key: str = "response"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3))


@dataclass(frozen=True)
class ClusterConfig:
    """Ray and the worker processes. The number of Megatron processes is nodes x procs_per_node."""

    address: str | None = None  # None: start a local cluster on loopback; else join (host:port or "auto")
    nodes: int = 1
    procs_per_node: int = 1  # Megatron ranks a node (GPUs a node on the cuda lane)
    start_timeout_s: float = 120.0
    call_timeout_s: float = 600.0  # deadline on any single worker call


@dataclass(frozen=True)
class TrainerConfig:
    """The loop."""

    total_steps: int = 1
    critic_warmup: int = 0  # first steps in which the critic alone is trained
    val_before_train: bool = True
    test_every_steps: int = 0  # 0: only before and after
    save_every_steps: int = 0  # 0: only at the end
    max_checkpoints_to_keep: int = 2  # the newest so many; 0: all
    keep_checkpoint_every_steps: int = 0  # besides these, every checkpoint whose step is a multiple of it; 0: none
    async_checkpoints: bool = True  # training stops for a copy of the state only; it is written meanwhile
    checkpoint_timeout_s: float = 1800.0  # a save in the background must be on the disk by then
    resume: str = "auto"  # auto | disable
    # within an hour, when ranks are lost in the loop: of those that train, which go on from the last checkpoint; of
    # each role that only computes, within the step; of all engines when none is left that could answer. 0: the job ends
    max_restarts: int = 1
    export: bool = True  # write a Hugging Face folder at the end
    loggers: tuple[str, ...] = ("console", "jsonl", "tensorboard")
    dump_rollouts_every_steps: int = 1  # parquet; 0: never
    report: bool = True


@dataclass(frozen=True)
class RunConfig:
    """One run: `hybridflow train` and `hybridflow sft` read the same file."""

    name: str = "run"
    seed: int = 1
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
