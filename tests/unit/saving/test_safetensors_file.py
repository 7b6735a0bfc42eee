"""What stands beside exported shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.errors import StorageError
from hybridflow.saving.safetensors_file import write_surroundings


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_surroundings(tmp_path, {}, {}, {"model_type": "qwen3"})
    assert str(StorageError.of(caught.value)).startswith(f"{tmp_path / 'config.json'}: No space left on device; ")
