"""The example of docs/controller.md, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs_and_prints_what_it_computes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "controller.md").read_text(encoding="utf-8")
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["shares.py", "start.py", "join.py"]
    for name, text in files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "start.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line
        for line in done.stdout.splitlines()
        if line.split(" ")[0] in {"scaled", "total", "label", "count"}
    ]
    assert lines == [
        "scaled [0, 10, 20, 30, 40]",
        "total 150",
        "label rank 0 of 2",
        "count [1, 1] total 60",
        "count [3, 3]",
    ]
    assert "joined shares 2 [2, 2]" in done.stdout
