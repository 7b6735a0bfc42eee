"""The transformers implementation of a family, which the FSDP backend and the `hf` engine use
instead of Megatron's."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.errors import ModelError
from hybridflow.models.family import Family


def causal_on_meta(family: Family, dtype: torch.dtype = torch.float32) -> Any:
    """Build the causal language model on the meta device, without allocating its weights.

    Raises:
        ModelError: transformers does not support this `model_type`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(family.hf["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers does not support model_type {model_type!r}; use another actor.backend "
            "or rollout.engine"
        )
    config = CONFIG_MAPPING[model_type].from_dict(dict(family.hf))
    # SDPA does not support attention sinks
    has_sdpa = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
    kind = "sdpa" if has_sdpa else "eager"
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=kind, dtype=dtype)


def allocate(causal: Any, device: torch.device) -> None:
    """Allocate the model on `device` with uninitialised weights."""
    causal.to_empty(device=device)
    # rotary frequencies are not part of a checkpoint and were not computed on the meta device
    causal.model.rotary_emb = type(causal.model.rotary_emb)(causal.config).to(device)
    embedding = causal.model.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):  # nor Gemma's embedding scale
        embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    if causal.config.tie_word_embeddings:  # to_empty unties the weights
        causal.lm_head.weight = causal.model.embed_tokens.weight
