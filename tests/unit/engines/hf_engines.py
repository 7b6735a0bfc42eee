"""Started engines `hf` with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.engines.base import ENGINES
from hybridflow.engines.spec import EngineSpec
from tests.models import HfConfig


def engine_of(hf: HfConfig, folder: Path, **spec: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(hf))
    made = ENGINES.get("hf")(
        EngineSpec("engine-0", str(folder), **spec), folder / "log", lambda: None
    )
    made.start()
    made.wait_ready()
    return made


def fill(engine: Any, scale: float = 0.3, version: str = "7") -> None:
    """Random weights, as if from a trainer."""
    # the norms of these add 1 to their weights, but for the norm in a delta net
    is_centered = engine._model.config.model_type.startswith(("qwen3_next", "qwen3_5"))

    def values(places: Mapping[str, torch.Tensor]) -> int:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in places.items():
            is_one = "norm" in name and not (is_centered and "linear_attn." not in name)
            mean = 1.0 if is_one else 0.0
            tensor.copy_(torch.empty(tensor.shape).normal_(mean, scale, generator=generator))
        return len(places)

    assert engine.take(version, values) > 0
