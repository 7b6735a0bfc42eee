"""Functions that open the datasets and the sampler. A user-defined dataset class is validated
before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.registry import attribute_of, import_file
from hybridflow.config.schema import DataConfig
from hybridflow.data.dataset import PreferenceDataset, PromptDataset
from hybridflow.data.sampler import ResumableSampler
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError

COLUMNS = ("prompt_ids", "data_source", "ground_truth", "extra_info", "index")
_METHODS = ("__len__", "batch", "data_sources")


class Prompts(Protocol):
    """The protocol of a dataset of prompts. `PromptDataset` is the built-in implementation and may
    be subclassed."""

    def __len__(self) -> int: ...

    @property
    def data_sources(self) -> list[str]:
        """The distinct data sources of all rows, sorted."""
        ...

    def batch(self, indices: np.ndarray) -> DataProto:
        """Return the rows at `indices` [B], with the same columns as `PromptDataset.batch`."""
        ...


def open_prompts(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: DataConfig,
    max_rows: int | None = None,
) -> Prompts:
    """Open the dataset by calling `data.dataset_class` (by default `PromptDataset`) as `cls(files,
    tokenizer, config, max_rows=...)`.

    Raises:
        ConfigError: the file or class is missing, fails to import or lacks a method, or its batches
            lack a column.
    """
    wanted = config.dataset_class
    if wanted.path is None:
        return PromptDataset(files, tokenizer, config, max_rows=max_rows)
    made = _load(Path(wanted.path), wanted.name)(files, tokenizer, config, max_rows=max_rows)
    missing = []
    for name in COLUMNS:
        if len(made) and name not in made.batch(np.zeros(1, np.int64)):
            missing.append(name)
    if missing:
        raise ConfigError(
            f"{wanted.path}: {wanted.name}.batch() lacks column {missing[0]!r}; it needs "
            f"{', '.join(COLUMNS)}"
        )
    return cast(Prompts, made)


def open_training(tokenizer: Tokenizer, config: DataConfig) -> Prompts | PreferenceDataset:
    """Open the training data: prompts for the engines to answer or, with `data.answers=pairs`,
    prompts with recorded answers.

    Raises:
        ConfigError: rows would repeat within a step, or `open_prompts` failed.
        DataError: a file of pairs lacks a column, or a row is malformed.
    """
    dataset: Prompts | PreferenceDataset
    if config.answers == "pairs":
        dataset = PreferenceDataset(
            config.train_files, tokenizer, config, config.chosen_key, config.rejected_key
        )
    else:
        dataset = open_prompts(config.train_files, tokenizer, config)
    if config.train_batch_size > len(dataset):
        raise ConfigError(
            f"data.train_batch_size={config.train_batch_size} exceeds the {len(dataset)} rows of "
            f"data.train_files ({', '.join(config.train_files)}), so rows would repeat within a "
            "step; reduce it and actor.ppo_mini_batch_size, or add data"
        )
    return dataset


def open_sampler(
    config: DataConfig, dataset: Prompts | PreferenceDataset, seed: int
) -> ResumableSampler:
    """Return the sampler: shuffled or in file order, with the weights and curriculum set in `data`.

    Raises:
        ConfigError: a row lacks the number named by `data.weight_key` or `data.difficulty_key`.
    """
    weights, difficulty = (
        _numbers(dataset, key) for key in (config.weight_key, config.difficulty_key)
    )
    try:
        return ResumableSampler(
            len(dataset),
            config.train_batch_size,
            config.shuffle,
            seed,
            weights=weights,
            difficulty=difficulty,
        )
    except ValueError as error:
        raise ConfigError(
            f"data.weight_key={config.weight_key} data.difficulty_key={config.difficulty_key}: "
            f"{error}"
        ) from error


def _numbers(dataset: Prompts | PreferenceDataset, key: str | None) -> np.ndarray | None:
    if key is None:
        return None
    infos = dataset.batch(np.arange(len(dataset))).dense("extra_info")
    for row, info in enumerate(infos):
        if not isinstance((info or {}).get(key), (int, float)):
            raise ConfigError(
                f"row {row}: extra_info[{key!r}] must be a number, as required by data.weight_key "
                "or data.difficulty_key"
            )
    return np.array([info[key] for info in infos], dtype=np.float64)


def _load(path: Path, name: str) -> Any:
    found = attribute_of(
        import_file(path, "data.dataset_class.path"),
        name,
        "data.dataset_class.name",
        inspect.isclass,
        "a class",
    )
    missing = [method for method in _METHODS if not hasattr(found, method)]
    if missing:
        raise ConfigError(
            f"{path}: class {name} lacks {', '.join(missing)}; add them, or subclass "
            "hybridflow.data.dataset.PromptDataset"
        )
    return found
