"""Images in a batch, and the positions of tokens in rows with images.

A row with images has the jagged columns `PIXELS` [p, c] (float32: the patches of all images) and
`GRIDS` [i, 3] (int64: frames, rows and columns of patches of each image). Its prompt has one image
token for every square of merged patches, in the order of the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.model_config import VISION_MODELS

PIXELS = "pixel_values"
GRIDS = "image_grid_thw"
IMAGES = (PIXELS, GRIDS)


@dataclass(frozen=True)
class ImageTokens:
    """How a model represents images as tokens.

    Attributes:
        token: id of the image token.
        merge: number of patches along each side of the square that one token represents.
    """

    token: int
    merge: int

    def counts(self, grids: np.ndarray) -> np.ndarray:
        """Return the number of tokens [i] of each image, given the grids [i, 3]."""
        return np.asarray(grids, np.int64).prod(1) // self.merge**2

    def places(self, prompt: np.ndarray, grids: np.ndarray, *, more: bool = False) -> np.ndarray:
        """Return the positions [n] of the image tokens of a prompt [t] with these images.

        Args:
            more: the prompt may be followed by sampled tokens; any image tokens among those are
                treated as text.

        Raises:
            ValueError: the number of image tokens, or the boundary between two images, does not
                match the grids.
        """
        found = np.flatnonzero(prompt == self.token)
        counts = self.counts(grids)
        found = found[: counts.sum()] if more else found
        if len(found) != counts.sum():
            raise ValueError(
                f"a prompt has {len(found)} image tokens ({self.token}), but its {len(grids)} "
                f"images need {counts.tolist()}; prepare the prompt with the model's own image "
                "processor"
            )
        bounds = np.concatenate([[0], np.cumsum(counts)])
        for begin, end in pairwise(bounds.tolist()):
            if end > begin and found[end - 1] - found[begin] != end - begin - 1:
                raise ValueError(
                    f"the image tokens {begin} to {end - 1} of a prompt belong to one image, but "
                    "other tokens are between them"
                )
        return found

    def axes(self, length: int, places: np.ndarray, grids: np.ndarray) -> np.ndarray:
        """Return the positions [3, length] (frame, row, column) of a row's tokens.

        A text token has the same position on every axis, one more than the largest before it. The
        tokens of an image start at that position, plus their frame, row and column in the image
        (Qwen2-VL, arXiv 2409.12191; transformers' `get_rope_index`).

        Args:
            length: number of tokens, including those of the response.
            places: positions of the image tokens (`places`).
            grids: the patch grids [i, 3] of the row's images.
        """
        axes = np.empty((3, length), np.int64)
        at = position = used = 0
        for (frames, rows, columns), count in zip(
            np.asarray(grids).tolist(), self.counts(grids).tolist(), strict=True
        ):
            first = int(places[used])
            axes[:, at:first] = position + np.arange(first - at)
            position += first - at
            shape = (frames, rows // self.merge, columns // self.merge)
            axes[:, first : first + count] = position + np.indices(shape).reshape(3, -1)
            position += max(shape[1:])
            at = first + count
            used += count
        axes[:, at:] = position + np.arange(length - at)
        return axes


def check_images(batch: DataProto, images: ImageTokens | None) -> None:
    """Reject images that the model cannot process.

    Raises:
        ValueError: the model has no vision tower, or the patches do not match the grids.
    """
    held = [name for name in IMAGES if name in batch]
    if not held:
        return
    if images is None:
        raise ValueError(
            f"the batch has the column {held[0]}, but the model has no vision tower; use "
            f"{VISION_MODELS}"
        )
    if len(held) == 1:
        raise ValueError(f"the batch has only the column {held[0]}; it must have both of {IMAGES}")
    pixels = batch.jagged(PIXELS)
    grids = batch.jagged(GRIDS)
    before = np.concatenate([[0], np.cumsum(grids.values.prod(1))])
    wrong = np.flatnonzero(np.diff(before[grids.offsets]) != pixels.lengths)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"row {row} has {pixels.lengths[row]} patches in {PIXELS}, but {GRIDS} specifies "
            f"{grids.row(row).prod(1).tolist()} for its images"
        )
