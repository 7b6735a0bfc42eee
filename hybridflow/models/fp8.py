"""Block-wise fp8, the format in which DeepSeek-V3 was published: the set of quantised tensors and
their scales.

`X.weight` is float8_e4m3fn `[o, i]` and `X.weight_scale_inv` float32 `[ceil(o / rows), ceil(i /
columns)]`. A weight is its fp8 value times the scale of its block. The linears of attention, MLP
and experts are quantised; embeddings, norms, biases, routers, MTP's `eh_proj` and the output head
are not (transformers: `quantizers/quantizer_finegrained_fp8.py`; SGLang:
`layers/quantization/fp8.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ModelError
from hybridflow.models.mxfp4 import METHOD

if TYPE_CHECKING:
    import torch  # imported lazily: planning does not need torch

FP8 = "float8_e4m3fn"
SCALE_SUFFIX = "_scale_inv"
_QUANTISED_PARTS = (".self_attn.", ".mlp.", ".block_sparse_moe.")
_ROUTER = ".gate.weight"
_BLOCK_WISE: Mapping[str, str] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
}


@dataclass(frozen=True)
class BlockQuantisation:
    """A block-wise fp8 format: the block size (rows, columns), and the modules that are not
    quantised, named as in HF's `modules_to_not_convert`.
    """

    block: tuple[int, int] = (128, 128)
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.block) != 2 or min(self.block) < 1:
            raise ModelError(
                "quantization_config.weight_block_size must be two positive numbers (rows, "
                f"columns), got {list(self.block)}"
            )

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> BlockQuantisation:
        """Return the engines' weight format as specified in config.json. The default block size is
        128 x 128.

        Raises:
            ModelError: config.json specifies another quantisation, static activation scales, or
                scales rounded to powers of two.
        """
        said: Mapping[str, Any] = hf_config.get("quantization_config") or {}
        _refuse_others(said, {**_BLOCK_WISE, "scale_fmt": "float"}, "is not supported for engines")
        return cls(
            tuple(said.get("weight_block_size") or (128, 128)),
            tuple(said.get("modules_to_not_convert") or ()),
        )

    @classmethod
    def of_checkpoint(cls, hf_config: Mapping[str, Any]) -> BlockQuantisation | None:
        """Return the weight format of a Hugging Face folder, or None if it is not quantised or uses
        MXFP4 (`models.mxfp4`).

        Raises:
            ModelError: the folder uses a quantisation other than block-wise fp8.
        """
        said: Mapping[str, Any] = hf_config.get("quantization_config") or {}
        if not said or (
            said.get("quant_method") == METHOD and hf_config.get("model_type") == "gpt_oss"
        ):
            return None
        _refuse_others(
            {"quant_method": "none", **said}, _BLOCK_WISE, "is not supported for weights"
        )
        if not said.get("weight_block_size"):
            raise ModelError(
                "quantization_config has no weight_block_size: fp8 weights must have one scale per "
                "block; use a folder in bfloat16 or in block-wise fp8"
            )
        return cls(tuple(said["weight_block_size"]))

    def dequantise(
        self, values: torch.Tensor, scales: torch.Tensor, start: Sequence[int]
    ) -> torch.Tensor:
        """Dequantise a region of a weight to fp32 [o, i].

        Args:
            values: [o, i] fp8 values of the region.
            scales: scales of the blocks that overlap the region (`blocks_of`).
            start: first row and column of the region in the tensor.
        """
        import torch

        for dim, (size, first) in enumerate(zip(self.block, start, strict=True)):
            at = (torch.arange(first, first + values.shape[dim]) // size) - first // size
            scales = scales.index_select(dim, at)
        return values.float() * scales

    def blocks_of(
        self, start: Sequence[int], shape: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (start, shape) of the scales that belong to a region of a weight."""
        first = tuple(low // size for low, size in zip(start, self.block, strict=True))
        ends = (
            -(-(low + n) // size) for low, n, size in zip(start, shape, self.block, strict=True)
        )
        return first, tuple(end - low for end, low in zip(ends, first, strict=True))

    def covers(self, name: str, shape: Sequence[int]) -> bool:
        """Return True if the HF tensor is quantised."""
        if (
            len(shape) != 2
            or not name.endswith(".weight")
            or name.endswith(_ROUTER)
            or not any(part in name for part in _QUANTISED_PARTS)
        ):
            return False
        module = name.removesuffix(".weight")
        return not any(
            module == other or module.startswith(f"{other}.") or module.endswith(f".{other}")
            for other in self.skipped
        )

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales for a weight `[..., rows, columns]`."""
        return (*shape[:-2], -(-shape[-2] // self.block[0]), -(-shape[-1] // self.block[1]))

    def checkpoint(
        self, tensors: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return ({HF name: shape}, {HF name: dtype}) of a quantised checkpoint.

        The shapes list each scale directly after its tensor. The dtypes cover only quantised
        tensors and scales.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        for name, shape in tensors.items():
            shapes[name] = tuple(shape)
            if self.covers(name, shape):
                shapes[f"{name}{SCALE_SUFFIX}"] = self.scale_shape(shape)
                dtypes |= {name: FP8, f"{name}{SCALE_SUFFIX}": "float32"}
        return shapes, dtypes

    def config(self) -> dict[str, Any]:
        """Return the `quantization_config` for config.json that makes an engine allocate block-wise
        fp8 buffers."""
        skipped = {"modules_to_not_convert": list(self.skipped)} if self.skipped else {}
        return {**_BLOCK_WISE, "weight_block_size": list(self.block), **skipped}


def _refuse_others(said: Mapping[str, Any], accepted: Mapping[str, str], what: str) -> None:
    for key, value in accepted.items():
        if said.get(key) not in (None, value):
            raise ModelError(
                f"quantization_config.{key}={said[key]!r} {what}; block-wise fp8 requires {value!r}"
            )
