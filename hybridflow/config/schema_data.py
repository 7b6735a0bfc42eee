"""The keys of what a run reads: prompts (`data`), demonstrations (`sft`) and preference pairs
(`reward_training`). Part of `hybridflow.config.schema`, which says what all keys have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hybridflow.config.keys import PREPARE_TASK, NonNegativeInt, PositiveInt
from hybridflow.config.schema_megatron import OptimConfig


@dataclass(frozen=True)
class PrepareConfig:
    """Dataset preparation that runs before training when its output is missing. `task: null` skips
    it."""

    # as in `hybridflow prepare`; null: nothing is prepared
    task: Annotated[str, PREPARE_TASK] | None = None
    source: str | None = None  # folder of raw files, for tasks that need one
    out: str = "data"  # folder that receives train.parquet, test.parquet, [sft.parquet], tokenizer/
    options: dict[str, Any] = field(default_factory=dict)  # task specific, e.g. {num_train: 4000}


@dataclass(frozen=True)
class DatasetClassConfig:
    """A dataset class of yours in place of `PromptDataset`; `hybridflow.data.custom.Prompts` says
    what it must have."""

    path: str | None = None  # python file; null: the built-in class
    name: str = "Dataset"


@dataclass(frozen=True)
class DataConfig:
    """Prompts: parquet rows {data_source, prompt, ability, reward_model{style, ground_truth},
    extra_info}."""

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    # which answers a step trains on; sampled: the policy's own; pairs: recorded ones, for dpo, ipo
    # and kto: train_files then has rows {prompt, chosen, rejected}
    answers: Literal["sampled", "pairs"] = "sampled"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    # more held-out sets, each with metrics of its own: {name: {files: [...], max_prompts: ...,
    # samples: ..., sampling: {...}, chat_template_kwargs: {...}}}; what a set leaves out is as
    # val_max_prompts, rollout.val_samples, rollout.val_sampling and chat_template_kwargs say
    val_sets: dict[str, Any] = field(default_factory=dict)
    # column of chat messages, or of text, which becomes the message of a user
    prompt_key: str = "prompt"
    # column of what an answer is judged by; a point leads into a struct: reward_model.ground_truth
    ground_truth_key: str = "reward_model.ground_truth"
    data_source_key: str = "data_source"  # column that names the verifier
    data_source: str | None = None  # of all rows, where files have no such column
    # what the chat template is given besides the messages, for example {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    train_batch_size: PositiveInt = 64  # prompts a step
    val_max_prompts: PositiveInt | None = None  # null: all of them
    max_prompt_length: PositiveInt = 512  # tokens, after the chat template
    max_response_length: PositiveInt = 512  # tokens
    # drop prompts longer than max_prompt_length instead of refusing to start
    filter_overlong_prompts: bool = False
    # a prompt whose last message is the assistant's is the beginning of the answer; false: such a
    # row is refused
    continue_final_message: bool = False
    # where a prompt that is too long and not filtered is cut; error: the job does not start
    truncation: Literal["error", "left", "right", "middle"] = "error"
    shuffle: bool = True
    # key of extra_info: how often a row comes, relative to others; null: every row once an epoch
    weight_key: str | None = None
    # key of extra_info: each epoch goes from small values to large ones; null: no curriculum
    difficulty_key: str | None = None
    # keep the tokens of large files in ~/.cache/hybridflow/tokens, for later runs of the same
    # content (docs/data.md)
    cache_tokens: bool = True
    dataset_class: DatasetClassConfig = field(default_factory=DatasetClassConfig)


@dataclass(frozen=True)
class RewardTrainingConfig:
    """`hybridflow train-reward`: a reward model from preference pairs, parquet rows {prompt,
    chosen, rejected}."""

    steps: NonNegativeInt = 0
    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()  # held-out pairs, for the accuracy at the end
    batch_size: PositiveInt = 64  # pairs a step
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))


@dataclass(frozen=True)
class SftConfig:
    """Supervised warm start on rows {prompt, response}, or on whole conversations. `steps: 0` skips
    it."""

    steps: NonNegativeInt = 0
    train_files: tuple[str, ...] = ()
    batch_size: PositiveInt = 64  # sequences a step
    response_key: str = "response"
    # column of whole conversations, of which all turns of the assistant are learned (docs/data.md);
    # null: rows {prompt, response}
    messages_key: str | None = None
    # column of booleans, one for each turn of the assistant: whether it is learned; null: all are
    learned_key: str | None = None
    # column of the tools that a conversation had, a list of declarations or its JSON; null: those
    # of rollout.agent
    tools_key: str | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3))
