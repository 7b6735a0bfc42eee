"""What a model family must say about itself, and how one is found from a Hugging Face config."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import torch

from hybridflow.errors import ModelError
from hybridflow.models.layout import Coordinates, LocalTensor


class Family(Protocol):
    """The map between Hugging Face and Megatron for one architecture."""

    hf: Mapping[str, Any]
    architecture: str
    num_layers: int
    vocab_size: int

    def megatron_config(self) -> dict[str, Any]:
        """Keyword arguments of Megatron's TransformerConfig that follow from the HF config."""
        ...

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of Megatron's GPTModel: rotary base, tied embeddings, vocabulary."""
        ...

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the HF checkpoint with its shape, in checkpoint order."""
        ...

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """The parameters that the rank at these coordinates holds."""
        ...


# model_type -> (module, class); loaded when asked for
_FAMILIES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen3_moe": ("qwen3", "Qwen3"),
    "mixtral": ("mixtral", "Mixtral"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "kimi_k2": ("deepseek_v3", "DeepseekV3"),
    "glm4_moe": ("glm4_moe", "Glm4Moe"),
}


def family_of(hf_config: Mapping[str, Any], *, mtp: bool = False) -> Family:
    """The family for a HF config (the contents of config.json).

    Args:
        mtp: whether the multi-token-prediction heads that the config announces belong to the model. Off, they are
            neither imported nor exported, as transformers does it.

    Raises:
        ModelError: `model_type` is missing or not supported, or the config lacks something.
    """
    model_type = hf_config.get("model_type")
    if model_type not in _FAMILIES:
        raise ModelError(
            f"model_type {model_type!r} has no parameter map; supported: {', '.join(sorted(_FAMILIES))}. "
            "Set it in model.hf_config or config.json."
        )
    module, name = _FAMILIES[str(model_type)]
    family: Family = getattr(importlib.import_module(f"hybridflow.models.{module}"), name)(hf_config, mtp)
    return family


def num_parameters(family: Family) -> int:
    """Numbers in the model's weights; buffers (expert biases) apart."""
    buffers = {
        piece.source for local in family.local_tensors(Coordinates()) if local.is_buffer for piece in local.pieces
    }
    return sum(prod(shape) for name, shape in family.tensors().items() if name not in buffers)


def kept_dtypes(family: Family) -> dict[str, torch.dtype]:
    """{HF tensor: dtype} of those that keep a precision of their own whatever the model runs in (expert biases)."""
    local = family.local_tensors(Coordinates())
    return {piece.source: getattr(torch, one.dtype) for one in local if one.dtype is not None for piece in one.pieces}
