"""Conversion of the images in a data file to patches, the input of a vision tower. The image
processor in the model folder (a transformers class) resizes and normalises them, always using
Pillow, so that every machine computes the same patches.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.schema import DataConfig
from hybridflow.data.files import Row
from hybridflow.data.image_tokens import GRIDS, PIXELS, ImageTokens
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError

COLUMN = "images"  # objects: the encoded images of each row, as a list of bytes
PLACE = "<image>"  # marks the place of an image in a message that is a string
_FILE = "preprocessor_config.json"
_TOKEN = "<|image_pad|>"
_THREADS = 8


class ImageReader:
    """The image processor in a tokenizer's folder (that of Qwen2-VL, which its successors also
    use).

    Raises:
        DataError: the folder has no image processor, or the tokenizer has no image token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        file = tokenizer.path / _FILE
        try:
            self.settings = read_outside_json(file)
            self.side = int(self.settings["patch_size"])
            self.tokens = ImageTokens(self._token(), int(self.settings.get("merge_size", 2)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"data.image_key needs the model's image processor, but {file} cannot be used "
                f"({error!r}); set model.tokenizer (or model.path) to the folder of a "
                "vision-language model"
            ) from error

    def _token(self) -> int:
        ids = self.tokenizer.encode(_TOKEN)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer has no token {_TOKEN}")
        return ids[0]

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil.from_dict(dict(self.settings))

    def grids(self, images: Sequence[bytes]) -> np.ndarray:
        """Return (frames, rows, columns) [i, 3] of the patches of each image, from the size in its
        header.

        Raises:
            DataError: an image cannot be read, or its sides differ by more than a factor of 200.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        found = []
        least, most = (self._processor.size[name] for name in ("shortest_edge", "longest_edge"))
        for number, image in enumerate(images):
            width, height = _opened(image, number).size
            try:
                height, width = smart_resize(
                    height, width, self.side * self.tokens.merge, least, most
                )
            except ValueError as error:
                raise DataError(f"image {number}: {error}") from error
            found.append((1, height // self.side, width // self.side))
        return np.array(found, np.int64).reshape(-1, 3)

    def patches(self, images: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the patches [p, c] (float32) of these images and their grids [i, 3].

        Raises:
            DataError: an image cannot be decoded.
        """
        if not images:
            return np.empty((0, self.patch_numbers), np.float32), np.empty((0, 3), np.int64)
        decoded = []
        for number, image in enumerate(images):
            opened = _opened(image, number)
            try:
                decoded.append(opened.convert("RGB"))
            except (OSError, SyntaxError, ValueError) as error:
                raise DataError(f"image {number} cannot be decoded: {error}") from error
        made = self._processor(images=decoded, return_tensors="np")
        return (
            np.asarray(made["pixel_values"], np.float32),
            np.asarray(made["image_grid_thw"], np.int64),
        )

    @property
    def patch_numbers(self) -> int:
        """The number of values per patch (c)."""
        return 3 * int(self._processor.temporal_patch_size) * self.side**2

    def expanded(self, ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return a rendered prompt's ids with each image token repeated for every token of its
        image.

        Raises:
            DataError: the prompt does not have one image token for each image.
        """
        grids = self.grids(images)
        counts = self.tokens.counts(grids).tolist()
        places = ids.count(self.tokens.token)
        if places != len(counts):
            raise DataError(
                f"the prompt has {places} image placeholders, but the row has {len(counts)} "
                f'images; mark each image with "{PLACE}" in the text or with a part '
                '{"type": "image"}, and use a chat template that renders them'
            )
        left = iter(counts)
        found: list[int] = []
        for token in ids:
            found += [token] * (next(left) if token == self.tokens.token else 1)
        return found


def reader_of(tokenizer: Tokenizer, config: DataConfig) -> ImageReader | None:
    """Create the reader for a dataset's images. Returns None if `data.image_key` is not set."""
    return None if config.image_key is None else ImageReader(tokenizer)


def images_of(row: Row, column: str) -> list[bytes]:
    """Return the encoded images in a row: a list of bytes or of {"bytes", "path"} objects, the
    format of the `datasets` library. The result is empty if the value is null.

    Raises:
        DataError: the value has a different form, or contains only the path of an image instead of
            its bytes.
    """
    value = row.values.get(column)
    if value is None:
        return []
    found = []
    for image in value if isinstance(value, list | tuple) else [value]:
        data = image.get("bytes") if isinstance(image, Mapping) else image
        if not isinstance(data, bytes | bytearray):
            raise DataError(
                f"{row.path}, row {row.number}, column {column!r}: expected a list of images, each "
                'as bytes or as {"bytes": ...}, found '
                f"{type(data).__name__ if data is not None else 'no bytes'}; write the contents of "
                "the image files into the data file"
            )
        found.append(bytes(data))
    return found


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat messages with each string that contains `PLACE` split into the parts that
    chat templates expect: {"type": "text", "text": ...} and {"type": "image"}.

    Raises:
        DataError: a part of a message is a video.
    """
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and PLACE in content:
            parts: list[dict[str, Any]] = []
            for number, text in enumerate(content.split(PLACE)):
                parts += [{"type": "image"}] * bool(number)
                parts += [{"type": "text", "text": text}] * bool(text)
            content = parts
        if not isinstance(content, str) and any(part["type"] == "video" for part in content):
            raise DataError(
                "a message has a video, which is not supported; remove the row, or replace the "
                "video with some of its frames as images"
            )
        found.append({**message, "content": content})
    return found


def with_pixels(batch: DataProto, dataset: Any) -> DataProto:
    """Return the batch, which has the column `COLUMN`, with its encoded images converted to the
    columns `PIXELS` and `GRIDS`.

    If the dataset has no image reader, the batch is returned unchanged. Equal images are decoded
    once.

    Raises:
        DataError: an image cannot be decoded; the message names its row.
    """
    reader: ImageReader | None = getattr(dataset, "images", None)
    if reader is None:
        return batch
    rows = [tuple(images) for images in batch[COLUMN].tolist()]
    first: dict[tuple[bytes, ...], int] = {}
    for images, index in zip(rows, batch["index"].tolist(), strict=True):
        first.setdefault(images, index)

    def patches(images: tuple[bytes, ...]) -> tuple[np.ndarray, np.ndarray]:
        try:
            return reader.patches(images)
        except DataError as error:
            raise DataError(f"{dataset.places[first[images]]}: {error}") from error

    with ThreadPoolExecutor(_THREADS, "images") as threads:
        known = dict(zip(first, threads.map(patches, first), strict=True))
    pixels = [known[images][0] for images in rows]
    grids = [known[images][1] for images in rows]
    return batch.drop([COLUMN]).with_columns(
        **{
            PIXELS: Jagged.from_rows(pixels, np.float32),
            GRIDS: Jagged.from_rows(grids, np.int64),
        }
    )


def _opened(image: bytes, number: int) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(image))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError) as error:
        raise DataError(f"image {number} cannot be read: {error}") from error
