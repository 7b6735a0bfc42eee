"""Sizes of published models, as their config.json give them: for plans and figures without a checkpoint at hand.

They are written once, in the `hf_config` of the shipped configuration groups `configs/model/NAME.yaml`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hybridflow.config.locate import shipped_config_dir
from hybridflow.errors import ModelError


def published(name: str) -> dict[str, Any]:
    """The config of a published model.

    Raises:
        ModelError: there is none of this name here; lists those there are.
    """
    if name not in published_names():
        raise ModelError(
            f"no sizes of a model {name!r} are known here; there are {', '.join(published_names())}, or give a "
            f"config.json"
        )
    return _sizes(_group(name))


@functools.cache
def published_names() -> tuple[str, ...]:
    """The models whose sizes are known: the groups that give a vocabulary, which the tiny models leave open."""
    return tuple(sorted(file.stem for file in _group("*").parent.glob("*.yaml") if "vocab_size" in _sizes(file)))


def _group(name: str) -> Path:
    return shipped_config_dir() / "model" / f"{name}.yaml"


def _sizes(file: Path) -> dict[str, Any]:
    import yaml

    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    return dict(values.get("hf_config") or {})
