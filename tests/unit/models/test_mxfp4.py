"""MXFP4 folders: every region of a tensor is what transformers makes of its blocks and scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.model_folder import check_weights
from hybridflow.models.weights import RandomWeights, SafetensorsFolder
from tests.models import FAMILIES

CONFIG = {**FAMILIES["gpt_oss"], "quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as gpt-oss was published: experts in MXFP4, the rest in bfloat16."""
    shapes = family_of(CONFIG).tensors()
    source = RandomWeights(shapes, 3, 0.1)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = shape
            blocks = (experts, columns, rows // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, blocks, generator=generator, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(
                110, 130, blocks[:3], generator=generator, dtype=torch.uint8
            )
        else:
            tensors[name] = source.read(name, (0,) * len(shape), shape).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_region_is_transformers_value(folder: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = SafetensorsFolder(folder)
    shapes = family_of(CONFIG).tensors()
    assert source.names() == shapes.keys()
    assert source.form(EXPERTS) == (shapes[EXPERTS], "BF16")
    expected = convert_moe_packed_tensors(
        source.raw(f"{EXPERTS}_blocks"), source.raw(f"{EXPERTS}_scales")
    )
    assert len(expected.unique()) > 50
    for start, shape in (
        ((0, 0, 0), shapes[EXPERTS]),
        ((3, 0, 64), (2, 64, 33)),
        ((1, 31, 5), (1, 2, 7)),
        ((7, 33, 0), (1, 30, 192)),
    ):
        region = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
        assert torch.equal(source.read(EXPERTS, start, shape), expected[region])


def test_a_folder_without_scales_is_refused_by_name(folder: Path) -> None:
    check_weights(folder, family_of(CONFIG).tensors())
    whole = SafetensorsFolder(folder)
    tensors = {name: whole.raw(name) for name in whole.files if name != f"{EXPERTS}_scales"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"for example {EXPERTS}"):
        check_weights(folder, family_of(CONFIG).tensors())


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "gptq"), ("qwen3_moe", "mxfp4")])
def test_other_quantisations_are_refused_by_name(folder: Path, family: str, method: str) -> None:
    hf = {**FAMILIES[family], "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ModelError, match=f"quant_method='{method}' is not"):
        SafetensorsFolder(folder)
