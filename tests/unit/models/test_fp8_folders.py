"""Hugging Face folders in block-wise fp8: read with their scales, slice by slice, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.weights import RandomWeights, SafetensorsFolder
from hybridflow.saving.tools import import_
from tests.models import DENSE_UNTIED

BLOCK = (16, 24)
QUANTISED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
MODEL = {
    **DENSE_UNTIED,
    "num_hidden_layers": 1,
    "hidden_size": 40,
    "head_dim": 12,
    "torch_dtype": "bfloat16",
}


def write(
    folder: Path, quantization: dict[str, Any] | None, scales: bool = True
) -> dict[str, torch.Tensor]:
    """Write a folder with fp8 linears, blocks of very different size; the weights that they stand
    for."""
    shapes = family_of(MODEL).tensors()
    source = RandomWeights(shapes, 0, 0.05)
    stored = {}
    meant = {}
    for name, shape in shapes.items():
        values = source.read(name, (0,) * len(shape), shape)
        if "_proj" not in name:
            stored[name] = meant[name] = values
            continue
        grid = [-(-size // block) for size, block in zip(shape, BLOCK, strict=True)]
        scale = torch.rand(grid, generator=torch.Generator().manual_seed(len(name))) * 1e-3 + 1e-5
        wide = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[
            : shape[0], : shape[1]
        ]
        stored[name] = (values / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * wide
        if scales:
            stored[f"{name}_scale_inv"] = scale
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**MODEL, **extra}))
    return meant


def test_any_slice_is_read_with_its_scales(tmp_path: Path) -> None:
    meant = write(tmp_path / "hf", QUANTISED)
    source = SafetensorsFolder(tmp_path / "hf")
    for name, tensor in meant.items():
        assert torch.equal(source.read(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor), (
            name
        )
    name = "model.layers.0.mlp.gate_proj.weight"
    for row, column, rows, columns in (
        (5, 0, 3, 40),
        (15, 23, 2, 2),
        (16, 24, 40, 16),
        (63, 39, 1, 1),
    ):
        found = source.read(name, (row, column), (rows, columns))
        assert torch.equal(found, meant[name][row : row + rows, column : column + columns])


def test_an_import_writes_the_weights_that_are_meant(tmp_path: Path) -> None:
    meant = write(tmp_path / "hf", QUANTISED)
    done = import_(tmp_path / "hf", tmp_path / "out", None, 1 << 30)
    assert done.lines == ()
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quant_method='gptq' is not supported for weights",
        ),
        ({"format": "pack-quantized"}, "quant_method='none'"),
        ({**QUANTISED, "activation_scheme": "static"}, "activation_scheme='static'"),
        ({"quant_method": "fp8"}, "no weight_block_size"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "hf", quantization)
    with pytest.raises(ModelError, match=message) as error:
        SafetensorsFolder(tmp_path / "hf")
    assert str(tmp_path / "hf" / "config.json") in str(error.value)


@pytest.mark.parametrize(("quantization", "scales"), [(None, True), (QUANTISED, False)])
def test_fp8_without_scales_is_refused(
    quantization: dict[str, Any] | None, scales: bool, tmp_path: Path
) -> None:
    write(tmp_path / "hf", quantization, scales)
    with pytest.raises(ModelError, match=r"q_proj.weight is float8_e4m3fn without block scales"):
        SafetensorsFolder(tmp_path / "hf").read(
            "model.layers.0.self_attn.q_proj.weight", (0, 0), (4, 4)
        )
