"""Fields of a model's config.json: published ones pass, and a value that no model has is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.model_config import read_model_config, wrong_fields
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import SIZES
from hybridflow.models.published import published, published_names
from tests import models
from tests.published.configs import CONFIGS

USED = {
    name: family
    for family in FAMILIES.names()
    for name in {**SIZES, **FAMILIES.get(family).fields.used}  # type: ignore[attr-defined]
}
KNOWN = {
    **{f"published {name}": published(name) for name in published_names()},
    **{f"folder {name}": config for name, config in CONFIGS.items()},
    **{
        f"tests {name}": value
        for name, value in vars(models).items()
        if isinstance(value, dict) and "model_type" in value
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_models_config_has_no_wrong_field(name: str) -> None:
    assert wrong_fields(KNOWN[name]) == []


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("value", [{"a": 1}, [[1]], math.nan, -1, 1 << 80, "\x1b[2J"], ids=str)
def test_each_field_that_a_family_uses_is_checked(name: str, value: Any) -> None:
    if (name, value) == ("moe_layer_end_index", -1):
        pytest.skip("the last layer")
    (line,) = wrong_fields({name: value})
    assert line.startswith(f"{name}=") and ": expected " in line and line.isprintable()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"hidden_size": 64.0}, "hidden_size=64.0"),
        ({"rope_scaling": [["type", "yarn"]]}, "rope_scaling="),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling.factor='4'"),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_parameters.rope_theta=1"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8'"),
        (
            {"quantization_config": {"weight_block_size": [128, "x"]}},
            "weight_block_size=[128, 'x']",
        ),
        ({"quantization_config": {"modules_to_not_convert": 3}}, "modules_to_not_convert=3"),
        ({"num_hidden_layers": 10_000, "num_experts": 1 << 16}, "10000 layers with 65536 experts"),
    ],
)
def test_values_that_no_model_has_are_named(values: dict[str, Any], named: str) -> None:
    (line,) = wrong_fields({"model_type": "qwen3", **values})
    assert named in line


def test_a_file_is_read_with_its_fields_checked(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", "vocab_size": None}))
    assert read_model_config(file) == {"model_type": "qwen3", "vocab_size": None}
    file.write_text('{"rms_norm_eps": NaN}')
    with pytest.raises(ValueError, match="not a model config: rms_norm_eps=nan"):
        read_model_config(file)
