"""Images from data files: patches and tokens as transformers' processor makes them; malformed ones
are refused with file, row and column."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hybridflow.config.schema import DataConfig, SftConfig
from hybridflow.data.dataset import PromptDataset, SftDataset
from hybridflow.data.image_tokens import GRIDS, PIXELS
from hybridflow.data.images import ImageReader, with_pixels
from hybridflow.data.prepare import prepare
from hybridflow.data.prepare.tasks.geometry import CHARACTERS
from hybridflow.data.prepare.tokenizer_files import IMAGE_TEMPLATE, write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import DataError

CONFIG = DataConfig(image_key="images", max_prompt_length=64, data_source="geometry")


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"num_train": 8, "num_test": 4, "num_sft": 4}
    return prepare("geometry", tmp_path_factory.mktemp("geometry") / "data", None, options).folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "tokenizer")


def file_of(folder: Path, prompt: Any, images: Any, **other: Any) -> Path:
    row = {"prompt": prompt, "images": images, "reward_model": {"ground_truth": "r"}, **other}
    pq.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_patches_and_counts_are_those_of_the_image_processor(tokenizer: Tokenizer) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reader = ImageReader(tokenizer)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tokenizer.path)
    images = [picture(32, 32), picture(50, 20, "L"), picture(7, 40, "RGBA"), picture(90, 33, "P")]
    made = theirs(images=[Image.open(io.BytesIO(one)).convert("RGB") for one in images])
    pixels, grids = reader.patches(images)
    np.testing.assert_array_equal(grids, np.asarray(made["image_grid_thw"]))
    np.testing.assert_allclose(pixels, np.asarray(made["pixel_values"]), atol=1e-6)
    np.testing.assert_array_equal(reader.grids(images), grids)
    assert pixels.shape[1] == reader.patch_numbers
    none = reader.patches([])
    assert none[0].shape == (0, reader.patch_numbers) and none[1].shape == (0, 3)


@pytest.mark.parametrize(
    "prompt",
    [
        "a<image>b<image>",
        [{"role": "user", "content": "a<image>b<image>"}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "text": None},
                    {"type": "text", "text": "b"},
                    {"type": "image", "text": None},
                ],
            }
        ],
    ],
)
def test_each_place_becomes_the_tokens_of_its_image(
    prompt: Any, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    images = [{"bytes": picture(32, 16), "path": None}, {"bytes": picture(32, 32), "path": "x"}]
    dataset = PromptDataset([file_of(tmp_path, prompt, images)], tokenizer, CONFIG)
    batch = with_pixels(dataset.batch([0, 0]), dataset)
    reader = ImageReader(tokenizer)
    pad = [reader.tokens.token]
    marks = [tokenizer.encode(f"<|vision_{end}|>") for end in ("start", "end")]
    expected = [
        *tokenizer.encode("a"),
        *(marks[0] + 2 * pad + marks[1]),
        *tokenizer.encode("b"),
        *(marks[0] + 4 * pad + marks[1]),
        *tokenizer.encode("="),
    ]
    assert batch["prompt_ids"].row(1).tolist() == expected
    assert batch.jagged(GRIDS).row(1).tolist() == [[1, 2, 4], [1, 4, 4]]
    assert batch.jagged(PIXELS).row(1).shape == (8 + 16, reader.patch_numbers)
    assert "images" not in batch


def test_rows_without_images_are_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = PromptDataset([file_of(tmp_path, "ab", None)], tokenizer, CONFIG)
    batch = with_pixels(dataset.batch([0]), dataset)
    assert batch["prompt_ids"].row(0).tolist() == tokenizer.encode("ab=")
    assert batch.jagged(PIXELS).row(0).shape == (0, ImageReader(tokenizer).patch_numbers)
    assert len(batch.jagged(GRIDS).row(0)) == 0


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("a<image>", [], "has 1 image placeholders, but the row has 0 images"),
        (
            "a",
            [{"bytes": picture(16, 16)}],
            'has 0 image placeholders.* 1 images; mark each image with "<im',
        ),
        (
            "<|image_pad|><image>",
            [{"bytes": picture(16, 16)}],
            "has 2 image placeholders.* 1 images",
        ),
        ("<image>", [{"bytes": b"no image"}], "column 'prompt': image 0 cannot be read"),
        ("<image>", [{"bytes": picture(16, 16)[:60]}], "cannot be"),
        ("<image>", [{"bytes": None, "path": "a.png"}], "found no bytes; write the contents"),
        ("<image>", ["a.png"], "expected a list of images.*found str"),
        ("<image>", [{"bytes": picture(2000, 2)}], "aspect ratio must be smaller than 200"),
        (
            [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "a"}]}],
            [],
            "column 'prompt': a message has a video, which is not supported; remove the row",
        ),
    ],
)
def test_images_that_cannot_be_used_are_refused(
    prompt: Any, images: Any, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = file_of(tmp_path, prompt, images)
    with pytest.raises(DataError, match=f"(?s)rows.parquet, row 0, column.*{message}|{message}"):
        dataset = PromptDataset([file], tokenizer, CONFIG)
        with_pixels(dataset.batch([0]), dataset)


def test_messages_with_parts_need_the_key(tmp_path: Path, tokenizer: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    config = DataConfig(data_source="geometry")
    file = file_of(tmp_path, parts, [{"bytes": picture(16, 16)}])
    with pytest.raises(DataError, match=r"set data\.image_key for messages with parts"):
        PromptDataset([file], tokenizer, config)


def test_a_folder_without_an_image_processor_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write_character_tokenizer(tmp_path / "none", CHARACTERS, (), IMAGE_TEMPLATE)
    with pytest.raises(DataError, match=r"none/preprocessor_config\.json cannot be used"):
        ImageReader(load_tokenizer(tmp_path / "none"))
    (tmp_path / "none" / "preprocessor_config.json").write_text(json.dumps({"patch_size": 8}))
    with pytest.raises(DataError, match=r"has no token <\|image_pad\|>"):
        ImageReader(load_tokenizer(tmp_path / "none"))


def test_drawings_have_their_answers(folder: Path, tokenizer: Tokenizer) -> None:
    dataset = PromptDataset([folder / "train.parquet"], tokenizer, CONFIG)
    batch = with_pixels(dataset.batch(np.arange(8)), dataset)
    assert (batch.jagged(GRIDS).lengths == 1).all()
    for truth, info, images in zip(
        batch["ground_truth"],
        batch["extra_info"],
        dataset.batch(np.arange(8))["images"],
        strict=True,
    ):
        image = np.asarray(Image.open(io.BytesIO(images[0])).convert("RGB")).reshape(-1, 3)
        colours = {tuple(pixel) for pixel in image.tolist()} - {tuple(image[0].tolist())}
        if info["question"] == "colour":
            from hybridflow.data.prepare.tasks.geometry import COLOURS

            assert COLOURS[truth] in colours | {tuple(image[0].tolist())}
        assert truth in {"colour": "rgb", "shape": "ost", "count": "123"}[info["question"]]
    learned = SftDataset([folder / "sft.parquet"], tokenizer, CONFIG, SftConfig())
    batch = with_pixels(learned.batch(np.arange(4)), learned)
    assert (batch["response_ids"].lengths == 2).all() and PIXELS in batch
