"""Positions of tokens among images, as transformers computes them; what does not fit together is
refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged
from hybridflow.data.image_tokens import GRIDS, PIXELS, ImageTokens, check_images

TOKEN = 7
IMAGES = ImageTokens(TOKEN, 2)


def theirs(tokens: np.ndarray, grids: np.ndarray) -> np.ndarray:
    import torch
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model: Any = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    )
    model.get_vision_position_ids = lambda *args, **named: Qwen3VLModel.get_vision_position_ids(
        model, *args, **named
    )
    ids = torch.from_numpy(tokens)[None]
    found, _ = Qwen3VLModel.get_rope_index(
        model, ids, (ids == TOKEN).int(), image_grid_thw=torch.from_numpy(grids)
    )
    return np.asarray(found[:, 0].numpy())


@pytest.mark.slow
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4),
    texts=st.lists(st.integers(1, 5), min_size=5, max_size=5),
)
def test_positions_are_transformers(sizes: list[tuple[int, int]], texts: list[int]) -> None:
    grids = np.array([(1, 2 * a, 2 * b) for a, b in sizes], np.int64).reshape(-1, 3)
    row = [3] * texts[0]
    for (a, b), text in zip(sizes, texts[1:], strict=False):
        row += [*[TOKEN] * (a * b), *[3] * text]
    tokens = np.array(row)
    places = IMAGES.places(tokens, grids)
    assert (tokens[places] == TOKEN).all()
    ours = IMAGES.axes(len(tokens), places, grids)
    np.testing.assert_array_equal(ours, theirs(tokens, grids))


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([3, TOKEN, 3], [], "1 image tokens .* 0 images"),
        ([3, 3], [(1, 2, 2)], r"0 image tokens .* 1 images need \[1\]"),
        ([TOKEN, TOKEN, 3], [(1, 4, 4)], r"2 image tokens .* need \[4\]"),
        ([TOKEN, 3, TOKEN], [(1, 2, 4)], "image tokens 0 to 1 .* one image"),
    ],
)
def test_tokens_that_do_not_match_the_images_are_refused(
    tokens: list[int], grids: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        IMAGES.places(np.array(tokens), np.array(grids, np.int64).reshape(-1, 3))


def batch(patches: int, **without: None) -> DataProto:
    columns = {
        PIXELS: Jagged.from_rows([np.zeros((patches, 6)), np.zeros((0, 6))], np.float32),
        GRIDS: Jagged.from_rows([[(1, 2, 4)], np.zeros((0, 3))], np.int64),
    }
    return DataProto.from_columns({name: columns[name] for name in columns if name not in without})


def test_columns_of_images_are_checked_before_they_are_computed() -> None:
    check_images(batch(8), IMAGES)
    with pytest.raises(ValueError, match=r"row 0 has 7 patches.*specifies \[8\]"):
        check_images(batch(7), IMAGES)
    with pytest.raises(ValueError, match="only the column image_grid_thw; it must have both"):
        check_images(batch(8, pixel_values=None), IMAGES)
    with pytest.raises(ValueError, match="pixel_values, but the model has no vision tower"):
        check_images(batch(8), None)
