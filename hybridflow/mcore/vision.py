"""The vision tower in a Megatron model: transformers' own module on the first pipeline stage.

Its features replace the embeddings of image tokens, and in models with DeepStack are added to the
hidden states after the first layers. Every tensor-parallel rank computes the whole tower; under
sequence parallelism, each rank uses the features of its own tokens, and gradients are summed over
the ranks, like the gradients of norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.device.platform import Platform
from hybridflow.models.causal import vision_module
from hybridflow.models.vision import MODULE, Tower


@dataclass(frozen=True)
class Images:
    """The images of a packed micro-batch of t tokens: i images with p patches and n tokens.

    Attributes:
        pixels: [p, c] float32 patches of all images, in packed order.
        grids: [i, 3] int64 patch grid (frames, rows, columns) of each image.
        places: [n] positions of the image tokens among the t tokens.
    """

    pixels: Tensor
    grids: Tensor
    places: Tensor


@dataclass
class _Features:
    """Features of a micro-batch at this rank's image tokens.

    Attributes:
        rows: [m] indices of the image tokens in the rank's hidden states.
        embedded: [m, h] features that replace the embeddings of these tokens.
        added: [m, h] features to add to the output of each of the first layers.
    """

    rows: Tensor
    embedded: Tensor
    added: Sequence[Tensor]


def attach(model: Any, tower: Tower, config: TransformerConfig) -> None:
    """Add the tower, with uninitialised weights, to a model's first stage.

    The tower processes the images in a micro-batch's `packed_seq_params.images` (None if there are
    none).
    """
    with Platform.detect().current_device():
        vision = vision_module(tower, config.params_dtype)
    model.add_module(MODULE, vision)
    if config.sequence_parallel:
        for parameter in vision.parameters():
            parameter.sequence_parallel = True
    see = _Sight(vision, config)
    model.register_forward_pre_hook(see.begin, with_kwargs=True)
    model.embedding.register_forward_hook(see.embed)
    for number in range(len(tower.deepstack)):
        model.decoder.layers[number].register_forward_hook(see.adder(number), with_kwargs=True)


def freeze(models: Sequence[nn.Module]) -> None:
    """Exclude the tower's parameters from training. Call it before the model is wrapped."""
    for model in models:
        if (vision := getattr(model, MODULE, None)) is not None:
            vision.requires_grad_(False)


class _Sight:
    """The vision hooks of one model. The features of a micro-batch are stored in its
    `packed_seq_params`, because several micro-batches may be in flight and layers may be
    recomputed."""

    def __init__(self, vision: Any, config: TransformerConfig) -> None:
        self.vision = vision
        self.is_split = config.sequence_parallel
        self._packed: Any = None

    def begin(self, _: Any, inputs: Any, named: dict[str, Any]) -> None:
        """Record the micro-batch whose tokens will be embedded next."""
        self._packed = named["packed_seq_params"]

    def embed(self, _: Any, inputs: Any, output: Tensor) -> Tensor:
        """Compute the features, and replace the embeddings [t', 1, h] of the image tokens."""
        packed = self._packed
        self._packed = None
        packed.features = None
        if getattr(packed, "images", None) is None:
            return self._with_zero_gradients(output)
        packed.features = found = self._features(packed.images, len(output), output.dtype)
        return output.index_copy(0, found.rows, found.embedded[:, None])

    def adder(self, number: int) -> Any:
        """Return a hook that adds the features of a layer to its output."""

        def add(_: Any, inputs: Any, named: dict[str, Any], output: Any) -> Any:
            features = named["packed_seq_params"].features
            if features is None:
                return output
            hidden, *others = output
            added = features.added[number][:, None].to(hidden.dtype)
            return (hidden.index_add(0, features.rows, added), *others)

        return add

    def _features(self, images: Images, tokens: int, dtype: torch.dtype) -> _Features:
        trains = torch.is_grad_enabled() and self.vision.patch_embed.proj.weight.requires_grad
        with torch.set_grad_enabled(trains):
            found = self.vision(
                images.pixels.to(self.vision.dtype), grid_thw=images.grids, return_dict=True
            )
            embedded = found.pooler_output.to(dtype)
            added = list(getattr(found, "deepstack_features", ()))
        rows = images.places
        if self.is_split:
            first = parallel_state.get_tensor_model_parallel_rank() * tokens
            mine = (rows >= first) & (rows < first + tokens)
            rows = rows[mine] - first
            embedded = embedded[mine]
            added = [one[mine] for one in added]
        return _Features(rows, embedded, added)

    def _with_zero_gradients(self, output: Tensor) -> Tensor:
        """Connect a trained tower to the output with zero gradients. Used for micro-batches without
        images, because an overlapped reduction waits for the gradient of every parameter.
        """
        trained = [one for one in self.vision.parameters() if one.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return output
        return output + 0.0 * torch.stack([one.flatten()[0] for one in trained]).sum()
