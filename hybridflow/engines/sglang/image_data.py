"""Encoding of images in requests to SGLang. The engine receives the patches that the trainer
computes log-probs from, so no image is resized or normalised twice.

A request body has a table of its distinct images, and for each prompt the images' numbers in the
table: the samples of a prompt share its images. Both are JSON inside a string, because SGLang's
schema of request bodies (sglang/srt/entrypoints/api_contract.py) has no field for patches.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from hybridflow.engines.base import PromptImages

if TYPE_CHECKING:
    import torch

_MARK = "patches:"  # beginning of the string; others are files, addresses or data URIs
_IMAGES = "images"  # the table: `_GRID`, `_DIGEST` and base64 `_PATCHES` of each image
_ROWS = "rows"
_DTYPE = "dtype"
_GRID = "grid"
_DIGEST = "digest"
_PATCHES = "patches"
# PromptImages are float32; an engine's tower casts patches to its own dtype
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ImagePatches:
    """One image of a prompt, as received.

    Attributes:
        patches: [p, c].
        grid: frames, rows and columns of the patches.
        digest: 32 bytes; equal for equal images.
    """

    patches: torch.Tensor
    grid: tuple[int, int, int]
    digest: bytes


def encode(images: Sequence[PromptImages], dtype: str) -> str:
    """Return the value of `image_data` in the body of a request.

    Args:
        images: the images of each prompt.
        dtype: one of `DTYPES`; the dtype of the engine's vision tower.
    """
    numbers: dict[str, int] = {}
    table: list[dict[str, Any]] = []
    rows: list[list[int]] = []
    for place, one in enumerate(images):
        if place and one.equals(images[place - 1]):
            rows.append(rows[-1])
            continue
        row: list[int] = []
        end = 0
        for grid in one.grids.tolist():
            start = end
            end += grid[0] * grid[1] * grid[2]
            data = _bytes_of(one.pixels[start:end], dtype)
            digest = sha256(repr((grid, dtype)).encode() + data).hexdigest()
            if digest not in numbers:
                numbers[digest] = len(table)
                patches = base64.b64encode(data).decode()
                table.append({_GRID: grid, _DIGEST: digest, _PATCHES: patches})
            row.append(numbers[digest])
        rows.append(row)
    return _MARK + orjson.dumps({_IMAGES: table, _ROWS: rows, _DTYPE: dtype}).decode()


def is_encoded(image_data: Any) -> bool:
    """Return True if this `image_data` was made by `encode`."""
    return isinstance(image_data, str) and image_data.startswith(_MARK)


def decode(image_data: str) -> list[list[ImagePatches]]:
    """Return the images of each prompt.

    Raises:
        ValueError: the dtype is none of `DTYPES`, or the data does not match the grids.
    """
    import torch

    given = orjson.loads(image_data.removeprefix(_MARK))
    if given[_DTYPE] not in DTYPES:
        raise ValueError(f"dtype {given[_DTYPE]!r} is not one of {', '.join(DTYPES)}")
    dtype = getattr(torch, given[_DTYPE])
    table = []
    for number, one in enumerate(given[_IMAGES]):
        frames, rows, columns = one[_GRID]
        data = bytearray(base64.b64decode(one[_PATCHES], validate=True))
        values = torch.frombuffer(data, dtype=dtype)
        count = frames * rows * columns
        if not count or len(values) % count:
            raise ValueError(
                f"image {number} has {len(values)} values, which are not {count} equal patches"
            )
        digest = bytes.fromhex(one[_DIGEST])
        table.append(ImagePatches(values.view(count, -1), (frames, rows, columns), digest))
    return [[table[number] for number in row] for row in given[_ROWS]]


def _bytes_of(pixels: np.ndarray, dtype: str) -> bytes:
    values = np.ascontiguousarray(pixels, np.float32)
    if dtype == "float32":
        return values.tobytes()
    import torch

    return torch.tensor(values).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
