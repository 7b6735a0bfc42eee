"""The folder that engines of `hybridflow eval` and `serve` start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.schema import RunConfig
from hybridflow.errors import ModelError
from hybridflow.inference.model import opened
from hybridflow.inference.source import Source
from hybridflow.observe.progress import Progress
from tests.models import FAMILIES


def test_a_model_that_the_engine_would_compute_differently_is_refused(tmp_path: Path) -> None:
    tied = {**FAMILIES["gpt_oss"], "tie_word_embeddings": True}
    source = Source(tmp_path, tied, "float32")
    progress = Progress(0, "", enabled=False)
    with (
        pytest.raises(ModelError, match="model_type=gpt_oss with tie_word_embeddings=true"),
        opened(source, RunConfig(), progress),
    ):
        pass
