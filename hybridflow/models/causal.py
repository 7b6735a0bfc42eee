"""The transformers implementation of a model family, used by the FSDP backend and the `hf` engine
instead of Megatron."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from hybridflow.config.model_config import published_form
from hybridflow.errors import ModelError
from hybridflow.models.family import Family
from hybridflow.models.vision import Tower, tower_of

# transformers stores a layer's experts in two stacked tensors: gate above up, and down
_EXPERTS = re.compile(r"(?P<layer>.*\.)mlp\.experts\.(?P<part>gate_up|down)_proj$")
_MIXTRALS = ("mixtral", "minimax_m2")


def causal_on_meta(family: Family, dtype: torch.dtype = torch.float32) -> Any:
    """Build the causal language model, with its vision tower if it has one, on the meta device,
    without allocating its weights.

    Raises:
        ModelError: transformers does not support this `model_type`.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(family.hf["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers does not support model_type {model_type!r}; use another actor.backend "
            "or rollout.engine"
        )
    config = CONFIG_MAPPING[model_type].from_dict(published_form(family.hf))
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM
    if tower_of(family) is not None:
        kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto = AutoModelForImageTextToText
    # SDPA does not support attention sinks
    kind = "sdpa" if kinds[type(config)]._supports_sdpa else "eager"
    with torch.device("meta"):
        return auto.from_config(config, attn_implementation=kind, dtype=dtype)


def vision_module(tower: Tower, dtype: torch.dtype) -> Any:
    """Build a vision tower on the current device. Its weights still have to be loaded; its rotary
    frequencies, which checkpoints do not contain, are already set.
    """
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # published configs have the whole model's type here
    fields = {name: value for name, value in tower.config.items() if name != "model_type"}
    config = CONFIG_MAPPING[tower.kind].sub_configs["vision_config"].from_dict(fields)
    return AutoModel.from_config(config, attn_implementation="sdpa", dtype=dtype)


def allocate(causal: Any, device: torch.device) -> None:
    """Allocate the model on `device` with uninitialised weights."""
    causal.to_empty(device=device)
    # rotary frequencies are not part of a checkpoint and were not computed on the meta device
    text = getattr(causal.model, "language_model", causal.model)
    text.rotary_emb = type(text.rotary_emb)(text.config).to(device)
    if (vision := getattr(causal.model, "visual", None)) is not None:
        vision.rotary_pos_emb = type(vision.rotary_pos_emb)(vision.config).to(device)
    embedding = text.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):  # nor Gemma's embedding scale
        embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    if causal.config.tie_word_embeddings:  # to_empty unties the weights
        causal.lm_head.weight = text.embed_tokens.weight


def expert_names(model_type: str) -> tuple[str, str, str]:
    """Return the checkpoint names of an expert's gate, up and down projections."""
    return ("w1", "w3", "w2") if model_type in _MIXTRALS else ("gate_proj", "up_proj", "down_proj")


def checkpoint_views(
    model_type: str, name: str, tensor: torch.Tensor, first: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, view) for each checkpoint tensor that a transformers tensor contains.

    Args:
        name: transformers' name of the tensor.
        tensor: the tensor, or a range of its rows; for stacked experts [experts, ...], a range of
            experts.
        first: index of the first expert in that range.
    """
    mixtral = model_type in _MIXTRALS
    gate, up, down = expert_names(model_type)
    found = _EXPERTS.match(name)
    if found is None or model_type == "gpt_oss":
        saved_name = name.replace(".gate.moe_statics.", ".moe_statics.")  # ERNIE
        yield saved_name.replace(".mlp.", ".block_sparse_moe.") if mixtral else saved_name, tensor
        return
    experts = f"{found['layer']}{'block_sparse_moe' if mixtral else 'mlp'}.experts"
    for number, one in enumerate(tensor, first):
        parts = (
            {down: one}
            if found["part"] == "down"
            else dict(zip((gate, up), one.chunk(2), strict=True))
        )
        for part, view in parts.items():
            yield f"{experts}.{number}.{part}.weight", view
