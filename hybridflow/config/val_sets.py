"""The validation sets of a run: that of `data.val_files`, which has no name, and those of
`data.val_sets`. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.config.build import build_options
from hybridflow.config.keys import PositiveInt, out_of_range
from hybridflow.config.schema import MIN_TEMPERATURE, RunConfig, SamplingConfig, ValSamplingConfig
from hybridflow.errors import ConfigError

# column of prompts that are answered as validation answers the set of this name [B]
VAL_SET = "val_set"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ValSet:
    """Held-out prompts and how they are answered. What an entry of `data.val_sets` does not give is
    as for `data.val_files`."""

    files: tuple[str, ...] = ()
    max_prompts: PositiveInt | None = None  # null: all of them
    samples: PositiveInt = 1  # answers to each prompt
    sampling: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def val_sets(config: RunConfig) -> dict[str, ValSet]:
    """{name: set}; "" is the name of the set of `data.val_files`, which is always there and may
    have no files.

    Raises:
        ConfigError: an entry of `data.val_sets` has an unknown key or a value of a wrong type, or
            is no group of keys.
    """
    unnamed = _unnamed(config)
    return {"": unnamed} | {
        name: _built(unnamed, name, given) for name, given in config.data.val_sets.items()
    }


def sampling_of(config: RunConfig, name: str) -> SamplingConfig:
    """How the prompts of this set are answered."""
    unnamed = _unnamed(config)
    return (_built(unnamed, name, config.data.val_sets[name]) if name else unnamed).sampling


def tag(name: str) -> str:
    """What the metrics and the dumps of a set begin with, after "val" or "validation": nothing
    without a name."""
    return f"-{name}" if name else ""


def problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with each entry of `data.val_sets`, and with the number of answers of every
    set."""
    unnamed = _unnamed(config)
    found = dict[str, ValSet]()
    for name, given in config.data.val_sets.items():
        key = f"data.val_sets.{name}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield (
                f"data.val_sets: {name!r} names metrics and a folder; use letters, digits, points, "
                "dashes and underscores, and quote a name of digits"
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
                f"{key}.files is empty; give parquet files, for example {key}.files=[test.parquet]"
            )
    for name, one in {"": unnamed, **found}.items():
        if 0 < one.sampling.temperature < MIN_TEMPERATURE:
            section = f"data.val_sets.{name}.sampling" if name else "rollout.val_sampling"
            yield (
                f"{section}.temperature={one.sampling.temperature:g} must be 0, which takes the "
                f"most likely token, or at least {MIN_TEMPERATURE:g}"
            )
        if one.samples > 1 and not one.sampling.temperature:
            samples, temperature = (
                (f"data.val_sets.{name}.samples", f"data.val_sets.{name}.sampling.temperature")
                if name
                else ("rollout.val_samples", "rollout.val_sampling.temperature")
            )
            yield (
                f"{samples}={one.samples} with {temperature}=0: all answers to a prompt would be "
                "the same; raise the temperature, or set the samples to 1"
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
