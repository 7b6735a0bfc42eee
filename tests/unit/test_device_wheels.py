"""Wheels for a GPU machine without a package index: their pins, how they are cut, and what is
refused."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.gpu import install

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "device_wheels", ROOT / "requirements/device_wheels.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive(file: Path, files: dict[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return file


def test_its_pins_are_the_cpu_locks_but_for_what_a_cpu_has_not(wheels: ModuleType) -> None:
    pins = wheels.pins()
    assert sorted(pins) == ["a", "b", "c", "d", "e", "te"]
    locked = set((ROOT / "requirements/cpu.txt").read_text(encoding="utf-8").splitlines())
    of_gpus = {
        "sglang-kernel",
        "torch-memory-saver",
        "transformer-engine",
        "transformer-engine-cu13",
        *(f"nvidia-cutlass-dsl{part}" for part in ("", "-libs-base", "-libs-core", "-libs-cu13")),
    }
    of_gpus.add("transformer-engine-torch")
    others = {wheels.name_of(pin) for piece in pins.values() for pin in piece if pin not in locked}
    assert others == of_gpus


def test_a_library_that_is_cut_in_three_is_joined_where_it_is_installed(
    wheels: ModuleType, tmp_path: Path
) -> None:
    whole = archive(tmp_path / "large-1.0-py3-none-any.whl", {"large.bin": bytes(range(256)) * 5})
    wheels.cut(whole, [tmp_path / f"wheels/te{number}" for number in (1, 2, 3)])
    parts = sorted((tmp_path / "wheels").glob("*/*"))
    assert (
        len(parts) == 3
        and max(part.stat().st_size for part in parts) <= whole.stat().st_size // 3 + 1
    )
    (joined,) = install._joined(tmp_path / "wheels", tmp_path / "joined")
    assert joined.name == whole.name and joined.read_bytes() == whole.read_bytes()


def test_a_slim_wheel_keeps_all_but_what_is_left_out(wheels: ModuleType, tmp_path: Path) -> None:
    file = archive(
        tmp_path / "ray-1.0.whl",
        {"ray/jars/a.jar": b"1" * 99, "ray/core.py": b"2", "jars.py": b"3"},
    )
    wheels.slim(file, wheels.LEFT_OUT["ray"])
    with zipfile.ZipFile(file) as opened:
        assert (
            opened.namelist() == ["ray/core.py", "jars.py"] and opened.read("ray/core.py") == b"2"
        )


def test_a_piece_beyond_one_transfer_is_refused(
    wheels: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fetched(wanted: list[str], folder: Path) -> None:
        archive(folder / "some-1.0-py3-none-any.whl", {"some.bin": bytes(2000)})

    monkeypatch.setattr(wheels, "download", fetched)
    assert wheels.main(["b", "--out", str(tmp_path)]) == 0
    monkeypatch.setattr(wheels, "LIMIT", 1000)
    assert wheels.main(["b", "--out", str(tmp_path)]) == 1
    assert "a piece is larger" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["z"], "no piece z; there are a, b, c, e, te, d"),
        (["te", "--python", "/nowhere"], "does not exist"),
    ],
)
def test_bad_input_is_one_message(
    wheels: ModuleType, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fetched(wanted: list[str], folder: Path) -> None:
        archive(folder / "some-1.0-py3-none-any.whl", {"some.bin": b"1"})

    monkeypatch.setattr(wheels, "download", fetched)
    with pytest.raises(SystemExit) as stopped:
        wheels.main([*words, "--out", str(tmp_path)])
    assert said in f"{stopped.value.code}{capsys.readouterr().err}"


def test_a_python_without_the_torch_that_is_compiled_against_is_refused(
    wheels: ModuleType, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho /site-packages\necho 2.13.0+cpu\n")
    python.chmod(0o755)
    with pytest.raises(
        SystemExit, match=r"must have torch 2\.11\.0\+cu130; has torch 2\.13\.0\+cpu"
    ):
        wheels.compile_te(str(python), tmp_path)
