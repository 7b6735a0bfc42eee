"""What a user installs: the wheel, built as `pip install` builds it, in an environment that holds
nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


def run(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, without the variables by which a test finds the checkout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=kept | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def succeed(command: list[str], folder: Path) -> str:
    """What a command prints; it must end with status 0."""
    done = run(command, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def wheel_of(source: Path, out: Path) -> Path:
    """The wheel of a source folder or of an sdist."""
    words = [
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-w",
        str(out),
        str(source),
    ]
    succeed([sys.executable, "-m", "pip", "wheel", "-q", *words], out)
    (wheel,) = out.glob("hybridflow-*.whl")
    return wheel


def installed(wheel: Path, venv: Path) -> Path:
    """The Python of a new environment that has the wheel and what it depends on, and nothing
    else."""
    succeed([sys.executable, "-m", "venv", str(venv)], wheel.parent)
    python = venv / "bin/python"
    succeed(
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)],
        wheel.parent,
    )
    return python
