"""Sizes of published models from their config.json, for plans and estimates without a checkpoint.

They are defined once, as `hf_config` in the shipped configuration groups `configs/model/NAME.yaml`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hybridflow.config.locate import shipped_config_dir
from hybridflow.errors import ModelError


def published(name: str) -> dict[str, Any]:
    """Return the config of a published model.

    Raises:
        ModelError: unknown name; the message lists the available ones.
    """
    if name not in published_names():
        raise ModelError(
            f"unknown model {name!r}; choose one of {', '.join(published_names())}, or pass a "
            "config.json"
        )
    return _sizes(_group(name))


@functools.cache
def published_names() -> tuple[str, ...]:
    """Return the names of models with known sizes, i.e. of the configuration groups that set a
    vocabulary size. The tiny models do not set one.
    """
    return tuple(
        sorted(
            file.stem for file in _group("*").parent.glob("*.yaml") if "vocab_size" in _sizes(file)
        )
    )


def _group(name: str) -> Path:
    return shipped_config_dir() / "model" / f"{name}.yaml"


def _sizes(file: Path) -> dict[str, Any]:
    import yaml

    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    return dict(values.get("hf_config") or {})
