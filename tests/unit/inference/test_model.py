"""The folder that engines of `hybridflow eval` and `serve` start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.config.schema import RunConfig
from hybridflow.errors import ModelError
from hybridflow.inference.model import opened
from hybridflow.inference.source import Source, find
from hybridflow.models import family_of
from hybridflow.observe.progress import Progress
from tests.models import FAMILIES
from tests.published.multimodal import config_of, multimodal_folder, tensors_in


def test_a_model_that_the_engine_would_compute_differently_is_refused(tmp_path: Path) -> None:
    tied = {**FAMILIES["gpt_oss"], "tie_word_embeddings": True}
    source = Source(tmp_path, tied, "float32")
    progress = Progress(0, "", enabled=False)
    with (
        pytest.raises(ModelError, match="model_type=gpt_oss with tie_word_embeddings=true"),
        opened(source, RunConfig(), progress),
    ):
        pass


def test_engines_start_from_the_text_model_of_a_folder_with_a_tower(tmp_path: Path) -> None:
    folder = multimodal_folder("gemma3", tmp_path / "hf", tokenizer=True)
    came = tensors_in(folder)
    with opened(find(str(folder)), RunConfig(), Progress(0, "", enabled=False)) as model:
        config = config_of(model.engine_folder)
        assert config["model_type"] == "gemma3_text" and "vision_config" not in config
        went = tensors_in(model.engine_folder)
        assert went.keys() == family_of(config).tensors().keys()
        target = {"model.norm.weight": torch.zeros(32)}
        model.fill(target)
    [name] = [name for name in came if name.endswith("language_model.model.norm.weight")]
    assert torch.equal(target["model.norm.weight"], came[name])
