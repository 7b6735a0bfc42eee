"""Checks that each input file of a job exists or will be written by `data.prepare`. Does not import
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridflow.config import derived, hub
from hybridflow.config.build import build_options
from hybridflow.config.entries import PREPARATIONS
from hybridflow.config.schema import RunConfig
from hybridflow.config.val_sets import val_sets
from hybridflow.errors import ConfigError


def problems(config: RunConfig, job: str) -> Iterator[str]:
    """Yield one problem for each input that is missing and will not be written by
    `data.prepare`.
    """
    wanted = _prompts(config, job)
    if job == "train" and not config.data.train_files:
        yield (
            "data.train_files is empty; list parquet files, for example "
            "data.train_files=[train.parquet]"
        )
    if job == "train-reward":
        wanted["reward_training.train_files"] = config.reward_training.train_files
        wanted["reward_training.val_files"] = config.reward_training.val_files
        if not config.reward_training.steps:
            yield "reward_training.steps=0: nothing to train; set reward_training.steps=N"
        if not config.reward_training.train_files:
            yield (
                "reward_training.train_files is empty; list files of preference pairs, for example "
                "reward_training.train_files=[pairs.parquet]"
            )
    if job == "sft" and not config.sft.steps:
        yield "sft.steps=0: nothing to train; set sft.steps=N"
    if config.sft.steps:
        wanted["sft.train_files"] = config.sft.train_files
        if not config.sft.train_files:
            yield (
                f"sft.steps={config.sft.steps} requires sft.train_files, for example "
                "sft.train_files=[sft.parquet]"
            )
    for key in ("learned_key", "tools_key"):
        if getattr(config.sft, key) is not None and config.sft.messages_key is None:
            yield (
                f"sft.{key}={getattr(config.sft, key)} requires rows with whole conversations; set "
                f"sft.messages_key to their column, or remove this key"
            )
    yield from _missing(config, wanted)
    for key, script in (
        ("reward.path", config.reward.path),
        ("data.dataset_class.path", config.data.dataset_class.path),
    ):
        if script is not None and not Path(script).is_file():
            yield f"{key}={script}: file not found"
    yield from _prepare_source(config)
    yield from _output_folders(config)


def _prompts(config: RunConfig, job: str) -> dict[str, tuple[str, ...]]:
    """Return the prompt files that a job reads, as {key: files}."""
    wanted: dict[str, tuple[str, ...]] = {}
    if job == "train":
        wanted["data.train_files"] = config.data.train_files
    if job in ("train", "eval"):
        wanted["data.val_files"] = config.data.val_files
        for name, held_out in val_sets(config).items():
            if name:
                wanted[f"data.val_sets.{name}.files"] = held_out.files
    return wanted


def _missing(config: RunConfig, wanted: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for key, files in wanted.items():
        for file in files:
            if Path(file).is_dir():
                yield f"{key}: {file} is a folder; list its data files instead"
            elif not available(config, file):
                yield f"{key}: {file} {_absent(file)}"


def _output_folders(config: RunConfig) -> Iterator[str]:
    """Check that each folder that the run writes to is writable or can be created."""
    prepared = config.data.prepare.out if config.data.prepare.task is not None else None
    for key, folder in (
        ("output_dir", str(derived.run_dir(config))),
        ("data.prepare.out", prepared),
    ):
        if folder is None:
            continue
        path = Path(folder).absolute()
        there = next(filter(os.path.lexists, (path, *path.parents)))
        if not there.is_dir():
            yield (
                f"{key}: cannot create the folder {folder}, because {there} is a file; choose "
                f"another {key}"
            )
        elif not os.access(there, os.W_OK | os.X_OK):
            yield (
                f"{key}: {folder} is not writable: no write permission for {there}; choose another "
                f"{key}"
            )


def _absent(file: str) -> str:
    """Explain why a name matches no file. The name is a path, or a dataset's hub id with or without
    a pattern.
    """
    repository = file.partition(":")[0]
    if not hub.is_hub_id(repository):
        return "does not exist; check the path, or prepare it with `hybridflow prepare`"
    folder = hub.cached(repository, "dataset")
    if folder is None:
        return f"is {hub.missing(repository, 'dataset')}, or list files instead"
    return (
        f"is a dataset, but its snapshot {folder} has no matching files; use {repository}:PATTERN, "
        f"for example {repository}:data/train-*.parquet"
    )


def _prepare_source(config: RunConfig) -> Iterator[str]:
    prepare = config.data.prepare
    if prepare.source is not None and not Path(prepare.source).is_dir():
        yield f"data.prepare.source={prepare.source}: folder not found"
    optional = (  # the task arithmetic writes these only on request
        ("sft", config.sft.steps, "num_sft", "demonstrations", 2000),
        ("reward_training", config.reward_training.steps, "num_pairs", "pairs", 9500),
        ("data", config.data.answers == "pairs", "num_pairs", "pairs", 9500),
    )
    for section, is_read, option, rows, example in optional if prepare.task == "arithmetic" else ():
        files = (
            getattr(config, section).train_files
            if is_read and not prepare.options.get(option)
            else ()
        )
        made = []
        for file in files:
            if available(config, file) and not Path(file).exists():
                made.append(file)
        if made:
            yield (
                f"{section}.train_files: {made[0]} will not be written, because "
                f"data.prepare.options.{option} is 0; set the number of {rows}, for example "
                f"data.prepare.options.{option}={example}"
            )
    yield from _published(config)


def _published(config: RunConfig) -> Iterator[str]:
    """If `data.prepare` has not run yet, yield one line for each dataset that it reads but cannot
    find.
    """
    prepare = config.data.prepare
    out = Path(config.data.prepare.out)
    entry = PREPARATIONS.get(prepare.task).published if prepare.task is not None else None
    if prepare.task is None or entry is None or (out / "manifest.json").is_file():
        return
    try:
        options = build_options(
            PREPARATIONS.get(prepare.task).options(), prepare.options, "data.prepare.options"
        )
    except ConfigError as error:
        yield str(error)
        return
    for line in entry.missing(options, Path(prepare.source) if prepare.source else None):
        yield (
            f"{line}, or run `hybridflow prepare {prepare.task} --out {prepare.out}` first; to use "
            "your own files: data=files data.train_files=[...]"
        )


def available(config: RunConfig, path: str) -> bool:
    """Return True if a file exists, or `data.prepare` will write it."""
    if Path(path).exists():
        return True
    return config.data.prepare.task is not None and Path(path).resolve().is_relative_to(
        Path(config.data.prepare.out).resolve()
    )
