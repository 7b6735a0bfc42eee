"""Models that have learned nothing, of the tiny recipes' vocabulary: a teacher, which differs from the
policy all the more, and a reward model."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from hybridflow.config.load import load_config
from hybridflow.models import family_of
from hybridflow.models.family import Family
from hybridflow.models.scalar_head import SEQUENCE, ScalarHead
from hybridflow.models.weights import RandomWeights

TEACHER = "tiny-distill-teacher"


SPECIAL = {"vocab_size": 17, "eos_token_id": 1, "pad_token_id": 0}


def random_teacher(folder: Path) -> Path:
    """The Hugging Face folder of the recipe's teacher with random weights, written there."""
    return _written(folder, family_of({**load_config(TEACHER).model.hf_config, **SPECIAL}))


def random_reward_model(folder: Path) -> Path:
    """The Hugging Face folder of a reward model of the teacher's size, written there."""
    backbone = family_of({**load_config(TEACHER).model.hf_config, **SPECIAL})
    return _written(folder, ScalarHead(backbone, SEQUENCE))


def _written(folder: Path, family: Family) -> Path:
    shapes = family.tensors()
    weights = RandomWeights(shapes, seed=3, std=0.2)
    folder.mkdir(exist_ok=True)
    save_file(
        {name: weights.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(dict(family.hf)))
    return folder
