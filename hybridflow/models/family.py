"""What a model family must say about itself, and how one is found from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

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


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family for a HF config (the contents of config.json).

    Raises:
        ModelError: `model_type` is missing or not supported.
    """
    from hybridflow.models.qwen3 import Qwen3

    families = {"qwen3": Qwen3, "qwen3_moe": Qwen3}
    model_type = hf_config.get("model_type")
    if model_type not in families:
        raise ModelError(
            f"model_type {model_type!r} has no parameter map; supported: {', '.join(sorted(families))}. "
            "Set it in model.hf_config or config.json."
        )
    return families[str(model_type)](hf_config)
