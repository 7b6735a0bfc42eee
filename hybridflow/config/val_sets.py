"""The validation sets of a run: the unnamed set `data.val_files` and the sets in `data.val_sets`.
Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.config.build import build_options
from hybridflow.config.keys import PositiveInt, out_of_range
from hybridflow.config.schema import MIN_TEMPERATURE, RunConfig, ValSamplingConfig
from hybridflow.errors import ConfigError

# column [B] of validation prompts: the name of their set
VAL_SET = "val_set"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ValSet:
    """Held-out prompts and their sampling settings. Entries of `data.val_sets` inherit the settings
    of `data.val_files`."""

    files: tuple[str, ...] = ()
    max_prompts: PositiveInt | None = None  # null: all of them
    samples: PositiveInt = 1  # answers per prompt
    sampling: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def val_sets(config: RunConfig) -> dict[str, ValSet]:
    """Return the validation sets, keyed by name. The set of `data.val_files` is always included
    under the name "", even if it has no files.

    Raises:
        ConfigError: an entry of `data.val_sets` has an unknown key or a value of the wrong type, or
            is not a group of keys.
    """
    unnamed = _unnamed(config)
    return {"": unnamed} | {
        name: _built(unnamed, name, given) for name, given in config.data.val_sets.items()
    }


def tag(name: str) -> str:
    """Return the suffix that follows "val" or "validation" in the names of a set's metrics and
    dumps; empty for the unnamed set."""
    return f"-{name}" if name else ""


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each problem with an entry of `data.val_sets`, or with a set's temperature
    or number of answers.
    """
    unnamed = _unnamed(config)
    found = dict[str, ValSet]()
    for name, given in config.data.val_sets.items():
        key = f"data.val_sets.{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield (
                f"data.val_sets: {name!r} is used in metric and folder names; use only letters, "
                "digits, dots, dashes and underscores, and quote a name that consists only of "
                "digits"
            )
            continue
        try:
            found[name] = _built(unnamed, name, given)
        except ConfigError as error:
            yield str(error)
            continue
        yield from (f"{key}.{line}" for line in out_of_range(found[name]))
        if not found[name].files:
            yield (
                f"{key}.files is empty; set parquet files, for example {key}.files=[test.parquet]"
            )
    for name, one in {"": unnamed, **found}.items():
        if 0 < one.sampling.temperature < MIN_TEMPERATURE:
            section = f"data.val_sets.{name}.sampling" if name else "rollout.val_sampling"
            yield (
                f"{section}.temperature={one.sampling.temperature:g} must be 0 (greedy) or at "
                f"least {MIN_TEMPERATURE:g}"
            )
        if one.samples > 1 and not one.sampling.temperature:
            samples, temperature = (
                (f"data.val_sets.{name}.samples", f"data.val_sets.{name}.sampling.temperature")
                if name
                else ("rollout.val_samples", "rollout.val_sampling.temperature")
            )
            yield (
                f"{samples}={one.samples} with {temperature}=0: all answers to a prompt would be "
                "identical; raise the temperature, or set the samples to 1"
            )


def _unnamed(config: RunConfig) -> ValSet:
    data = config.data
    rollout = config.rollout
    template = data.chat_template_kwargs
    return ValSet(
        data.val_files, data.val_max_prompts, rollout.val_samples, rollout.val_sampling, template
    )


def _built(unnamed: ValSet, name: str, given: Mapping[str, Any]) -> ValSet:
    defaults = replace(unnamed, files=())
    made: ValSet = build_options(defaults, given, f"data.val_sets.{name}")
    return made
