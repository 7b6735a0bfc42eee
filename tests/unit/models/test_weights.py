"""A folder of weights is read with one open file for all its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from hybridflow.errors import ModelError
from hybridflow.models.weights import SafetensorsFolder


def test_a_file_is_opened_once_for_all_that_is_read_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: torch.randn(6, 4) for name in ("a", "b", "c")}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    opened = list[str]()
    original = safetensors.safe_open

    def counted(file: Path, **options: Any) -> Any:
        opened.append(Path(file).name)
        return original(file, **options)

    monkeypatch.setattr(safetensors, "safe_open", counted)
    for name, tensor in tensors.items():
        for row in range(0, 6, 2):
            assert torch.equal(source.read(name, (row, 1), (2, 3)), tensor[row : row + 2, 1:])
    assert opened == ["model.safetensors"]
    with pytest.raises(ModelError, match="too small for the region"):
        source.read("a", (4, 0), (4, 4))
    assert torch.equal(source.read("a", (0, 0), (6, 4)), tensors["a"])
