"""Configuration keys for data: prompts (`data`), demonstrations (`sft`) and preference pairs
(`reward_training`). Part of `hybridflow.config.schema`, which documents the conventions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from hybridflow.config.keys import PREPARE_TASK, NonNegativeInt, PositiveInt
from hybridflow.config.schema_megatron import OptimConfig


@dataclass(frozen=True)
class PrepareConfig:
    """Dataset preparation, which runs before training if its output does not exist. `task: null`
    skips it."""

    # task of `hybridflow prepare`; null: no preparation
    task: Annotated[str, PREPARE_TASK] | None = None
    source: str | None = None  # folder of raw files, for tasks that need one
    out: str = "data"  # folder that receives train.parquet, test.parquet, [sft.parquet], tokenizer/
    # options of the task, e.g. {num_train: 4000}
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetClassConfig:
    """Your own dataset class, used instead of `PromptDataset`. Its interface is
    `hybridflow.data.custom.Prompts`.
    """

    path: str | None = None  # Python file; null: the built-in class
    name: str = "Dataset"  # name of the class in the file


@dataclass(frozen=True)
class DataConfig:
    """Prompts: parquet rows {data_source, prompt, ability, reward_model{style, ground_truth},
    extra_info}."""

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    # answers that a step trains on; sampled: the policy's own; pairs: recorded ones, for dpo, ipo
    # and kto: train_files then has rows {prompt, chosen, rejected}
    answers: Literal["sampled", "pairs"] = "sampled"
    chosen_key: str = "chosen"  # answers=pairs: column of the better answer
    rejected_key: str = "rejected"  # answers=pairs: column of the worse answer
    # parquet, jsonl, json, csv or arrow files, or the hub id of a dataset (docs/data.md)
    train_files: tuple[str, ...] = ()
    # held-out prompts; empty: no validation, unless val_sets has files
    val_files: tuple[str, ...] = ()
    # additional held-out sets with separate metrics: {name: {files: [...], max_prompts: ...,
    # samples: ..., sampling: {...}, chat_template_kwargs: {...}}}; defaults are val_max_prompts,
    # rollout.val_samples, rollout.val_sampling and chat_template_kwargs
    val_sets: dict[str, Any] = field(default_factory=dict)
    # column of chat messages, or of text, which becomes a user message
    prompt_key: str = "prompt"
    # column of images, a list of bytes or of {bytes, path}; the messages have "<image>" or a part
    # {"type": "image"} for each; null: no images (docs/data.md)
    image_key: str | None = None
    # column of the ground truth; a dot leads into a struct: reward_model.ground_truth
    ground_truth_key: str = "reward_model.ground_truth"
    data_source_key: str = "data_source"  # column that names the verifier
    data_source: str | None = None  # data source of all rows, for files without such a column
    # extra arguments of the chat template, for example {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    train_batch_size: PositiveInt = 64  # prompts per step
    val_max_prompts: PositiveInt | None = None  # null: all of them
    max_prompt_length: PositiveInt = 512  # tokens, after the chat template
    max_response_length: PositiveInt = 512  # tokens
    # drop prompts longer than max_prompt_length instead of stopping with an error
    filter_overlong_prompts: bool = False
    # a prompt whose last message is the assistant's is the beginning of the answer; false: reject
    # such rows
    continue_final_message: bool = False
    # part of an overlong, unfiltered prompt to remove; error: the job does not start
    truncation: Literal["error", "left", "right", "middle"] = "error"
    shuffle: bool = True  # another order of the rows in every epoch; false: the order of the files
    # key of extra_info: relative frequency of a row; null: every row once per epoch
    weight_key: str | None = None
    # key of extra_info: sort each epoch by ascending values; null: no curriculum
    difficulty_key: str | None = None
    # cache the tokens of large files in ~/.cache/hybridflow/tokens, for later runs with the same
    # content (docs/data.md)
    cache_tokens: bool = True
    # samples have the column `prompt`, the messages of their row, for flows that make prompts of it
    keep_prompts: bool = False
    dataset_class: DatasetClassConfig = field(default_factory=DatasetClassConfig)


@dataclass(frozen=True)
class RewardTrainingConfig:
    """`hybridflow train-reward`: trains a reward model on preference pairs, parquet rows {prompt,
    chosen, rejected}."""

    steps: NonNegativeInt = 0  # optimizer updates
    train_files: tuple[str, ...] = ()  # files of pairs
    val_files: tuple[str, ...] = ()  # held-out pairs, for the accuracy at the end
    batch_size: PositiveInt = 64  # pairs per step
    chosen_key: str = "chosen"  # column of the better answer
    rejected_key: str = "rejected"  # column of the worse answer
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-4))


@dataclass(frozen=True)
class SftConfig:
    """Supervised warm start on rows {prompt, response}, or on whole conversations. `steps: 0` skips
    it."""

    steps: NonNegativeInt = 0  # optimizer updates; 0: no supervised training
    train_files: tuple[str, ...] = ()  # files of demonstrations or conversations (docs/data.md)
    batch_size: PositiveInt = 64  # sequences per step
    response_key: str = "response"  # column of the answer to learn
    # column of whole conversations, in which all assistant turns are learned (docs/data.md); null:
    # rows {prompt, response}
    messages_key: str | None = None
    # column of booleans, one per assistant turn: whether it is learned; null: all are
    learned_key: str | None = None
    # column of a conversation's tools, a list of declarations or its JSON; null: those of
    # rollout.agent
    tools_key: str | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3))
