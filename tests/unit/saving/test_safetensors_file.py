"""What stands beside exported shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.errors import StorageError
from hybridflow.saving import hf_export
from hybridflow.saving.safetensors_file import write_surroundings


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_surroundings(tmp_path, {}, {}, {"model_type": "qwen3"})
    assert str(StorageError.of(caught.value)).startswith(
        f"{tmp_path / 'config.json'}: No space left on device; "
    )


def test_a_crash_between_two_exports_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("export", "export.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text(name)
    kept = hf_export.os.replace

    def crash(source: Path, target: Path) -> None:
        if source.name == "export.partial":
            raise KeyboardInterrupt
        kept(source, target)

    with monkeypatch.context() as crashing:
        crashing.setattr(hf_export.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            hf_export._put_in_place(tmp_path / "export.partial", tmp_path / "export")
    assert {file.read_text() for file in tmp_path.glob("*/of")} == {"export", "export.partial"}
    hf_export._put_in_place(tmp_path / "export.partial", tmp_path / "export")
    assert [file.read_text() for file in tmp_path.glob("*/of")] == ["export.partial"]
