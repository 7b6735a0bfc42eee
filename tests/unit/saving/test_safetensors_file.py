"""What stands beside exported shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hybridflow.errors import StorageError
from hybridflow.saving.safetensors_file import write_surroundings


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_an_export_states_one_precision_to_old_and_new_readers(name: str, tmp_path: Path) -> None:
    write_surroundings(tmp_path, {}, {}, {"model_type": "qwen3", name: "float32"}, torch.bfloat16)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_surroundings(tmp_path, {}, {}, {"model_type": "qwen3"}, torch.bfloat16)
    assert str(StorageError.of(caught.value)).startswith(f"{tmp_path / 'config.json'}: No space left on device; ")
