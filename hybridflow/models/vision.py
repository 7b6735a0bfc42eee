"""The vision tower of a vision-language model, as data: its tensors, and the tokens that it fills.

The tower is transformers' own module (`mcore.vision` builds it). It is small next to the language
model, so every tensor-parallel rank of the first pipeline stage has all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config.model_config import VISION_TYPES, with_tower
from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.models.blocks import Shapes
from hybridflow.models.layout import Coordinates, LocalTensor, whole

MODULE = "vision"  # the tower's name in the Megatron model
_CONFIG = "vision_config"
# transformers' defaults (Qwen3VLVisionConfig)
_SIZES: Mapping[str, int] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_MOST = 1 << 16


@dataclass(frozen=True)
class Tower:
    """The vision tower of Qwen3-VL, which is also that of Qwen3.5 (without DeepStack).

    Attributes:
        kind: the model_type, which selects transformers' class.
        config: `vision_config` of config.json, with which transformers builds the module.
        sizes: the sizes among its fields.
        deepstack: blocks whose features are added to the hidden states after the first layers of
            the language model (DeepStack, arXiv 2406.04334): those of the i-th after layer i.
        prefix: of its tensors' names in a checkpoint.
        image_token: id of the token that each feature of an image replaces.
    """

    kind: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    deepstack: tuple[int, ...]
    prefix: str
    image_token: int

    @classmethod
    def of(
        cls,
        hf: Mapping[str, Any],
        prefix: str,
        image_token: int,
        deepstack: Sequence[int] | None,
    ) -> Tower:
        """Read the tower from a config.json.

        Args:
            image_token: the family's default for `image_token_id`.
            deepstack: the family's default for `deepstack_visual_indexes`; None: it has no
                DeepStack.

        Raises:
            ModelError: a field is missing or has an impossible value; the message names it.
        """
        kind = str(hf.get("model_type"))
        config = hf.get(_CONFIG)
        if not isinstance(config, Mapping):
            raise ModelError(
                f"the config of model_type {kind} has no {_CONFIG}; use the "
                "config.json of the whole model, not that of its language model"
            )
        sizes = {}
        for name, default in _SIZES.items():
            sizes[name] = _size(name, config.get(name, default))
        given = config.get("deepstack_visual_indexes", deepstack or ())
        if given and deepstack is None:
            raise ModelError(
                f"{_CONFIG}.deepstack_visual_indexes={given!r}: transformers ignores it in "
                f"model_type {kind}; set it to []"
            )
        if not isinstance(given, list | tuple) or any(
            type(one) is not int or not 0 <= one < sizes["depth"] for one in given
        ):
            raise ModelError(
                f"{_CONFIG}.deepstack_visual_indexes={given!r}: expected a list of blocks from 0 "
                f"to {sizes['depth'] - 1}"
            )
        if sizes["out_hidden_size"] != hf.get("hidden_size"):
            raise ModelError(
                f"{_CONFIG}.out_hidden_size={sizes['out_hidden_size']} is not the language model's "
                f"hidden_size={hf.get('hidden_size')}; make them equal"
            )
        token = hf.get("image_token_id", image_token)
        if type(token) is not int or token < 0:
            raise ModelError(f"image_token_id={token!r}: expected a token id")
        return cls(kind, config, sizes, tuple(given), prefix, token)

    @property
    def merge(self) -> int:
        """Number of patches along each side of the square that one token stands for."""
        return self.sizes["spatial_merge_size"]

    @property
    def patch_numbers(self) -> int:
        """Number of values in a patch."""
        side = self.sizes["patch_size"]
        return self.sizes["in_channels"] * self.sizes["temporal_patch_size"] * side * side

    def tensors(self) -> Shapes:
        """Return {HF tensor: shape}."""
        sizes = self.sizes
        hidden = sizes["hidden_size"]
        wide = hidden * self.merge**2
        side = sizes["patch_size"]
        kernel = (sizes["in_channels"], sizes["temporal_patch_size"], side, side)
        found: Shapes = {
            "patch_embed.proj.weight": (hidden, *kernel),
            "patch_embed.proj.bias": (hidden,),
            "pos_embed.weight": (sizes["num_position_embeddings"], hidden),
        }
        for number in range(sizes["depth"]):
            block = f"blocks.{number}."
            found |= _norm(f"{block}norm1", hidden) | _norm(f"{block}norm2", hidden)
            found |= _linear(f"{block}attn.qkv", 3 * hidden, hidden)
            found |= _linear(f"{block}attn.proj", hidden, hidden)
            found |= _linear(f"{block}mlp.linear_fc1", sizes["intermediate_size"], hidden)
            found |= _linear(f"{block}mlp.linear_fc2", hidden, sizes["intermediate_size"])
        mergers = {"merger.": hidden}
        for number in range(len(self.deepstack)):
            mergers[f"deepstack_merger_list.{number}."] = wide
        for merger, normed in mergers.items():
            found |= _norm(f"{merger}norm", normed)
            found |= _linear(f"{merger}linear_fc1", wide, wide)
            found |= _linear(f"{merger}linear_fc2", sizes["out_hidden_size"], wide)
        return {f"{self.prefix}{name}": shape for name, shape in found.items()}

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the tower's parameters on the rank at `at`: all on the first stage, none on the
        others."""
        if not at.is_first_stage:
            return []
        return [
            whole(f"{MODULE}.{name.removeprefix(self.prefix)}", name, shape)
            for name, shape in self.tensors().items()
        ]

    def check(self, at: Coordinates, num_layers: int) -> None:
        """Raise ModelError if the layers that receive DeepStack features are not all on the first
        (virtual) stage."""
        first = at.chunk_layers(num_layers)[0]
        if first < len(self.deepstack):
            raise ModelError(
                f"the first {'virtual ' if at.vpp_size > 1 else ''}pipeline stage has {first} "
                f"layers, but the vision tower adds features after {len(self.deepstack)} layers "
                f"({_CONFIG}.deepstack_visual_indexes); raise "
                "actor.parallel.first_stage_layers or lower actor.parallel.pipeline"
            )


def _size(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ModelError(f"{_CONFIG}.{name}={value!r}: expected a whole number from 1 to {_MOST}")
    return value


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def is_vision(parameter: str) -> bool:
    """Return True if this Megatron name, with or without the prefix of a virtual stage, denotes a
    parameter of the tower."""
    return re.sub(r"^chunk\d+\.", "", parameter).startswith(f"{MODULE}.")


def tower_of(family: Any) -> Tower | None:
    """Return the vision tower of a family; None if it has none."""
    found: Tower | None = getattr(family, "tower", None)
    return found


def check_vision(family: Any, parallel: ParallelConfig) -> None:
    """Raise ModelError if a model with a vision tower cannot be sharded this way."""
    if tower_of(family) is not None and parallel.context > 1:
        raise ModelError(
            f"actor.parallel.context={parallel.context}: context parallelism is not supported for "
            f"model_type {family.hf['model_type']!r}, whose positions have three axes; set it to 1"
        )


def check_training(family: Any, recompute: str, *, frozen: bool) -> None:
    """Raise ModelError if the vision tower cannot be trained with these settings
    (`actor.recompute`, `actor.freeze_vision_tower`)."""
    if frozen:
        return
    if tower_of(family) is None:
        with_images = with_tower(family.hf).get("model_type") in VISION_TYPES
        also = "set data.image_key, or " if with_images else ""
        raise ModelError(
            f"actor.freeze_vision_tower=false, but model_type {family.hf['model_type']!r} has no "
            f"vision tower that can be trained; {also}remove the key"
        )
    if recompute == "full":
        # each recomputed layer would run the backward pass of the tower, which frees its graph
        raise ModelError(
            "actor.recompute=full is not supported with actor.freeze_vision_tower=false; set "
            "recompute=selective, or freeze the tower"
        )
