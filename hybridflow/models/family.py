"""The interface of a model family, and family lookup by Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.config.model_config import TEXT_TYPES, flattened
from hybridflow.config.registry import Registry
from hybridflow.errors import ModelError
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.models.rotary import Rotary

if TYPE_CHECKING:
    import torch  # imported lazily: planning does not need torch


class Family(Protocol):
    """Maps the config and parameters of one architecture between Hugging Face and Megatron."""

    hf: Mapping[str, Any]
    architecture: str
    num_layers: int
    vocab_size: int
    rotary: Rotary

    @property
    def latent_norm_eps(self) -> float | None:
        """Epsilon of the latent-attention norms, or None if it is the same as for the other
        norms."""

    def megatron_config(self) -> dict[str, Any]:
        """Return the keyword arguments for Megatron's TransformerConfig that follow from the HF
        config."""

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments for Megatron's GPTModel: rotary base, tied embeddings,
        vocabulary."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor of the HF checkpoint with its shape, in checkpoint order."""

    def check(self, at: Coordinates) -> None:
        """Raise ModelError if a size is not divisible by its parallel size."""

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the parameters of the rank at these coordinates."""


FAMILIES: Registry[Callable[[Mapping[str, Any], bool], Family]] = Registry(
    "model family", "hybridflow.models.families", "model.family"
)


def family_of(hf_config: Mapping[str, Any], *, mtp: bool = False) -> Family:
    """Return the family for an HF config (the contents of config.json, `flattened` or not).

    Args:
        mtp: True to include the multi-token-prediction heads that the config declares. If False,
            the heads are neither imported nor exported, as in transformers.

    Raises:
        ModelError: `model_type` is missing or unsupported, or the config lacks a field or has an
            unsupported value.
    """
    hf_config = flattened(hf_config)
    model_type = str(hf_config.get("model_type"))
    if model_type in TEXT_TYPES and model_type not in FAMILIES.names():
        raise ModelError(
            f"the config of model_type {model_type} has no text_config; use the config.json of the "
            "model's folder"
        )
    if model_type not in FAMILIES.names():
        supported = ", ".join(sorted({*FAMILIES.names(), *TEXT_TYPES}))
        raise ModelError(
            f"model_type {model_type!r} is not supported; supported: {supported}. Set it in "
            "model.hf_config or config.json, or add your own parameter map: "
            f"model.family=path/to/file.py:{model_type} (for `hybridflow checkpoint`: --family)"
        )
    return FAMILIES.get(model_type)(hf_config, mtp)


def num_prediction_heads(family: Family) -> int:
    """Return the number of multi-token-prediction heads that the family includes."""
    return int(family.megatron_config().get("mtp_num_layers") or 0)


def without_prediction_heads(family: Family) -> Family:
    """Return the family without multi-token-prediction heads, or `family` itself if it has none."""
    return family_of(family.hf) if num_prediction_heads(family) else family


def use_family(name: str | None) -> None:
    """Register the family from a user's file, so that `family_of` finds it in this process.

    Args:
        name: `model.family`, "path/to/file.py:MODEL_TYPE"; the file calls
            `FAMILIES.register(MODEL_TYPE, ...)`.

    Raises:
        ConfigError: the file cannot be imported, or does not register the family.
    """
    if name is not None:
        FAMILIES.register(name.rpartition(":")[2], FAMILIES.get(name))


def num_parameters(family: Family) -> int:
    """Return the number of parameters in the model, excluding buffers (expert biases)."""
    buffers = set()
    for local in family.local_tensors(Coordinates()):
        if local.is_buffer:
            for piece in local.pieces:
                buffers.add(piece.source)
    return sum(prod(shape) for name, shape in family.tensors().items() if name not in buffers)


def kept_dtypes(family: Family) -> dict[str, torch.dtype]:
    """Return {HF tensor: dtype} for tensors whose dtype does not depend on the model's dtype
    (expert biases).
    """
    import torch

    local = family.local_tensors(Coordinates())
    kept: dict[str, torch.dtype] = {}
    for one in local:
        if one.dtype is not None:
            for piece in one.pieces:
                kept[piece.source] = getattr(torch, one.dtype)
    return kept
