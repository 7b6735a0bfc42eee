"""A teacher that has learned nothing: what it says differs from the policy all the more."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from hybridflow.config.load import load_config
from hybridflow.models import family_of
from hybridflow.models.weights import RandomWeights

TEACHER = "tiny-distill-teacher"


def random_teacher(folder: Path) -> Path:
    """The Hugging Face folder of the recipe's teacher with random weights, written there."""
    hf = {
        **load_config(TEACHER).model.hf_config,
        "vocab_size": 17,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    shapes = family_of(hf).tensors()
    weights = RandomWeights(shapes, seed=3, std=0.2)
    folder.mkdir(exist_ok=True)
    save_file(
        {name: weights.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(hf))
    return folder
