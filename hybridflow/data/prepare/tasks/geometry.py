"""Drawings of shapes: the prompt is an image and a one-character question, and the answer is one
character.

An image has one to three shapes of one kind and one colour, with random sizes and positions, on a
grey background. Each image occurs in only one row, so that no held-out image is trained on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa

from hybridflow.config.keys import AtLeast, AtMost, NonNegativeInt, PositiveInt
from hybridflow.data.prepare.options import check_ranges, require
from hybridflow.data.prepare.rows import prompt_row, write_demonstrations, write_prompts
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import (
    IMAGE_TEMPLATE,
    IMAGE_WORDS,
    write_character_tokenizer,
)

DATA_SOURCE = "geometry"
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "r": (220, 40, 40),
    "g": (40, 170, 60),
    "b": (50, 80, 220),
}
SHAPES = ("o", "s", "t")  # circle, square, triangle
QUESTIONS: Mapping[str, str] = {"colour": "c", "shape": "k", "count": "n"}
CHARACTERS = "ckn" + "rgb" + "ost" + "123" + "="
PATCH = 8  # pixels along each side; an image token stands for 2 x 2 patches
MERGE = 2
_SIDE = PATCH * MERGE
_EXTRA_INFO = {"split": pa.string(), "index": pa.int64(), "question": pa.string()}


@dataclass(frozen=True)
class GeometryOptions:
    """Options of the task (`data.prepare.options`).

    Attributes:
        questions: the properties to ask about: any of colour, shape and count.
        size: pixels along each side of an image, a multiple of 16.
        most_shapes: maximum number of shapes in an image.
        num_train, num_test: number of prompts.
        num_sft: demonstrations, for a warm start; 0 writes none.
        seed: seed for all random draws.
    """

    questions: tuple[str, ...] = tuple(QUESTIONS)
    size: Annotated[int, AtLeast(16), AtMost(1024)] = 32
    most_shapes: Annotated[int, AtLeast(1), AtMost(3)] = 3
    num_train: PositiveInt = 2000
    num_test: PositiveInt = 300
    num_sft: NonNegativeInt = 0
    seed: NonNegativeInt = 1

    def __post_init__(self) -> None:
        """Raise a ConfigError that names the option if one is out of range."""
        check_ranges(self)
        require(self.size % _SIDE == 0, "size", self.size, f"a multiple of {_SIDE}")
        known = bool(self.questions) and set(self.questions) <= QUESTIONS.keys()
        require(known, "questions", self.questions, f"some of {', '.join(QUESTIONS)}")


def write(options: GeometryOptions, out: Path, source: Path | None) -> dict[str, int]:
    """Write train.parquet, test.parquet, tokenizer/ with an image processor, and optionally
    sft.parquet. Returns the number of rows per file."""
    del source  # the data is generated
    rng = np.random.default_rng(options.seed)
    rows = {}
    for split, count in (("train", options.num_train), ("test", options.num_test)):
        prompts = [_row(options, split, index, rng) for index in range(count)]
        file = out / f"{split}.parquet"
        rows[file.name] = write_prompts(file, prompts, _EXTRA_INFO, images=True)
    if options.num_sft:
        demonstrations = []
        for index in range(options.num_sft):
            row = _row(options, "sft", index, rng)
            demonstration = {
                "prompt": row["prompt"],
                "response": row["reward_model"]["ground_truth"],
                "images": row["images"],
            }
            demonstrations.append(demonstration)
        file = out / "sft.parquet"
        rows[file.name] = write_demonstrations(file, demonstrations, images=True)
    write_character_tokenizer(out / "tokenizer", CHARACTERS, IMAGE_WORDS, IMAGE_TEMPLATE)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": _SIDE**2, "longest_edge": 1024**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    file = out / "tokenizer" / "preprocessor_config.json"
    file.write_text(json.dumps(processor, indent=2), encoding="utf-8")
    return rows


def _row(
    options: GeometryOptions, split: str, index: int, rng: np.random.Generator
) -> dict[str, Any]:
    colour = str(rng.choice(list(COLOURS)))
    shape = str(rng.choice(SHAPES))
    count = int(rng.integers(1, options.most_shapes + 1))
    answers = {"colour": colour, "shape": shape, "count": str(count)}
    question = str(rng.choice(options.questions))
    prompt = f"<image>{QUESTIONS[question]}"
    about = {"split": split, "index": index, "question": question}
    row = prompt_row(DATA_SOURCE, prompt, answers[question], about)
    drawn = draw(colour, shape, count, options.size, rng)
    return {**row, "images": [{"bytes": drawn, "path": None}]}


def draw(colour: str, shape: str, count: int, size: int, rng: np.random.Generator) -> bytes:
    """Return a PNG of `size` x `size` pixels with `count` equal shapes, each in a different
    quarter.
    """
    from PIL import Image, ImageDraw

    grey = int(rng.integers(150, 230))
    image = Image.new("RGB", (size, size), (grey, grey, grey))
    canvas = ImageDraw.Draw(image)
    half = size // 2
    fill = COLOURS[colour]
    for quarter in rng.permutation(4)[:count].tolist():
        side = int(rng.integers(half // 2, half - 1))
        column, row = divmod(quarter, 2)
        left = half * column + int(rng.integers(0, half - side))
        top = half * row + int(rng.integers(0, half - side))
        right = left + side
        bottom = top + side
        if shape == "o":
            canvas.ellipse((left, top, right, bottom), fill=fill)
        elif shape == "s":
            canvas.rectangle((left, top, right, bottom), fill=fill)
        else:
            middle = left + side // 2
            canvas.polygon([(left, bottom), (right, bottom), (middle, top)], fill=fill)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


TASKS.register("geometry", Task(GeometryOptions, write))
