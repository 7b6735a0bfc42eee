"""Warnings about settings that are valid but far from those of published runs with similar
models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError

# parameters; smaller models are trained from random weights, with other learning rates
_SMALL = 50e6
# highest learning rates in configs/published/ and of their adapters, plus a margin
_USUAL = 5e-6
_USUAL_LORA = 1e-4
_FAR = 4.0


def warnings(config: RunConfig) -> Iterator[str]:
    """Yield one line for each setting whose value is far from those used in published runs."""
    if config.model.path is None:
        return
    usual = _USUAL_LORA if config.actor.lora.rank else _USUAL
    lr = config.actor.optim.lr
    size = _parameters(config)
    if size is not None and size >= _SMALL and lr > _FAR * usual:
        yield (
            f"actor.optim.lr={lr:g} is far above the learning rates of published reinforcement "
            "learning from pretrained weights (3e-7 to "
            f"{usual:g}{' with adapters' if config.actor.lora.rank else ''}; this model has about "
            f"{size / 1e9:.1f}B parameters): the policy may collapse within a few steps; set "
            "actor.optim.lr=1e-6, or actor=pretrained"
        )


def _parameters(config: RunConfig) -> float | None:
    """Estimate the active parameters per token from the model's config; None if the sizes are
    missing."""
    try:
        sizes: Any = derived.hf_config(config.model)
    except ConfigError:
        return None
    hidden, layers, vocabulary = map(sizes.get, ("hidden_size", "num_hidden_layers", "vocab_size"))
    if not all(isinstance(number, int) for number in (hidden, layers, vocabulary)):
        return None
    return float(12 * layers * hidden**2 + vocabulary * hidden)
