"""What of the environment is found: all of it by the doctor, what stops a run before it starts."""

from __future__ import annotations

import locale
import os
import tempfile
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.process.obstacles import Obstacle, obstacles, require_none


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without obstacles."""
    for name in (
        "PYTHONPATH",
        "RAY_ADDRESS",
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("ALL_PROXY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)


def found(*libraries: str) -> dict[str, Obstacle]:
    return {one.topic: one for one in obstacles(libraries)}


def test_a_plain_environment_has_none() -> None:
    assert found("ray", "numpy") == {}
    require_none(("ray", "numpy"))


def test_what_only_surprises_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").touch()
    (tmp_path / "token").mkdir()
    (tmp_path / "token" / "__init__.py").touch()
    (tmp_path / "queue").mkdir()  # no package: it hides nothing
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("http_proxy", "http://proxy")
    shown = found()
    assert {topic: one.level for topic, one in shown.items()} == {
        "HOME": "unused",
        "TMPDIR": "warning",
        "RAY_ADDRESS": "warning",
        "proxy": "ok",
        "working directory": "unused",
    }
    assert shown["working directory"].what.startswith("random.py, token.py share names")
    assert "cluster.address=head:6379" in shown["RAY_ADDRESS"].remedy
    require_none(())
    monkeypatch.delenv("HOME")
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert found()["HOME"].what.startswith("is not set") and found()["TMPDIR"].level == "unused"


def test_another_version_of_a_library_is_refused_and_the_same_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import version

    other = tmp_path / "other"
    (other / "ray").mkdir(parents=True)
    (other / "ray" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'nothing'}{os.pathsep}{other}")
    with pytest.raises(
        ResourceError, match=f"{other} contains ray of unknown version.*remove {other} from"
    ):
        require_none(("torch", "ray"))
    require_none(("torch", "numpy"))  # a run without Ray does not mind
    for number, refused in (("0.1", True), (version("ray"), False)):
        info = other / f"ray-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {number}\n")
        assert ("PYTHONPATH" in found("ray")) == refused, number
        (info / "METADATA").unlink()
        info.rmdir()


def test_modules_of_pythons_names_in_its_path_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "select.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ResourceError, match=r"contains select\.py, which shadows Python's own"):
        require_none(())


def test_text_that_is_not_utf8_and_a_folder_that_was_removed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: "ISO-8859-1")
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    with pytest.raises(ResourceError) as refused:
        require_none(())
    assert "ISO-8859-1" in str(refused.value) and "LC_ALL=C.UTF-8" in str(refused.value)
    assert "working directory: cannot be read" in str(refused.value)
    monkeypatch.chdir(tmp_path)
