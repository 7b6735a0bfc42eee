"""Where the packages that programs in the sandbox may import lie."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.rewards.sandbox import Sandbox

try:
    Sandbox().close()
except ResourceError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_packages_and_interpreters_may_lie_in_tmp_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox's new root is mounted there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name, "answers")
        folder.mkdir()
        for path in (folder.parent, folder):
            path.chmod(0o755)
        (folder / "__init__.py").write_text("VALUE = 42\n")
        monkeypatch.setattr("hybridflow.rewards.sandbox._packages", lambda: [f"--package={folder}"])
        box = Sandbox()
        try:
            assert box.run("import answers\nprint(answers.VALUE)").stdout == "42\n"
        finally:
            box.close()
