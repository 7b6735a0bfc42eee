"""Prefill for prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybridflow.data.image_tokens import ImageTokens
from hybridflow.engines.base import PromptImages

if TYPE_CHECKING:
    from transformers import DynamicCache


def read_images(
    causal: Any,
    images: Sequence[PromptImages],
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: DynamicCache,
) -> torch.Tensor:
    """Compute the keys and values of prompts with images.

    transformers' own forward pass would treat every image token as an image placeholder, including
    those that the policy sampled in an earlier turn.

    Args:
        causal: the transformers model.
        images: the images of each prompt.
        ids, mask: [b, s] left-padded tokens, and a mask that is 0 at padding.
        cache: receives the keys and values.

    Returns:
        Offsets [b, 1]: a later token's position is the number of tokens before it plus this offset.
    """
    model = causal.model
    merge = causal.config.vision_config.spatial_merge_size
    tokens = ImageTokens(causal.config.image_token_id, merge)
    positions, places, deltas = _positions(tokens, images, ids, mask)
    seen = _features(model, images, ids.device)
    embedded = model.get_input_embeddings()(ids)
    embedded[places] = torch.cat(list(seen.pooler_output)).to(embedded.dtype)
    deepstack: dict[str, Any] = {}
    if hasattr(seen, "deepstack_features"):
        features = [torch.cat(list(one)) for one in seen.deepstack_features]
        deepstack["visual_pos_masks"] = places
        deepstack["deepstack_visual_embeds"] = features
    model.language_model(
        inputs_embeds=embedded,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **deepstack,
    )
    return deltas


def _positions(
    tokens: ImageTokens, images: Sequence[PromptImages], ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens' positions on three axes [3, b, s], a mask that is True at image
    placeholders [b, s], and the offset that `read_images` returns.
    """
    token_positions = (mask.cumsum(-1) - 1).clamp(min=0)
    positions = token_positions.repeat(3, 1, 1)
    places = torch.zeros_like(mask, dtype=torch.bool)
    deltas = torch.zeros_like(mask[:, :1])
    for row, one in enumerate(images):
        start = int((mask[row] == 0).sum())
        own = ids[row, start:].cpu().numpy()
        if len(own):
            found = tokens.places(own, one.grids, more=True)
            axes = tokens.axes(len(own), found, one.grids)
            positions[:, row, start:] = torch.from_numpy(axes)
            places[row, start + torch.from_numpy(found)] = True
            deltas[row] = int(axes.max()) + 1 - len(own)
    return positions, places, deltas


def _features(model: Any, images: Sequence[PromptImages], device: torch.device) -> Any:
    """Return the vision tower's output for the images of all prompts."""
    pixels = np.concatenate([one.pixels for one in images])
    grids = np.concatenate([one.grids for one in images]).astype(np.int64)
    return model.get_image_features(
        torch.from_numpy(pixels).to(device), torch.from_numpy(grids).to(device), return_dict=True
    )
