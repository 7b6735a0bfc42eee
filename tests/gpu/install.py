"""Install the wheels that were brought to a machine without a package index, into a folder of their
own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels/device"
LIMIT_S = 120.0


def install(site: Path, wheels: Path = WHEELS) -> list[dict[str, Any]]:
    """Records of what was installed into `site`: one in all, and one more for each wheel that pip
    refuses.

    A distribution that the machine has is left as it is there.
    """
    if not wheels.is_dir():
        return []
    begun = time.monotonic()
    brought = sorted([*wheels.glob("*/*.whl"), *_joined(wheels, site.parent / "joined")])
    missing = [wheel for wheel in brought if not _is_there(wheel)]
    if not _is_there(ROOT / "hybridflow"):
        missing.append(ROOT)  # SGLang finds our plugins by the entry points of a distribution
    if not missing:
        return []
    refused = []
    # all at once takes seconds; one by one finds the wheel that is to blame
    if _pip(missing, site):
        refused = [(wheel, why) for wheel in missing if (why := _pip([wheel], site))]
    found = [
        {"check": f"install {wheel.name}", "status": "failed", "why": why} for wheel, why in refused
    ]
    whole: dict[str, Any] = {
        "check": "install",
        "status": "passed",
        "shows": "wheels without an index",
    }
    whole |= {
        "seconds": round(time.monotonic() - begun, 1),
        "figures": {"wheels": len(missing) - len(refused)},
    }
    return [whole, *found]


def _joined(wheels: Path, folder: Path) -> list[Path]:
    """Wheels that came in parts, put together in `folder`."""
    parts: dict[str, list[Path]] = {}
    for part in sorted(wheels.glob("*/*.whl.part*")):
        parts.setdefault(part.name.rpartition(".part")[0], []).append(part)
    joined = []
    for name, pieces in parts.items():
        whole = folder / name
        folder.mkdir(exist_ok=True)
        with whole.open("wb") as file:
            for piece in sorted(pieces, key=lambda piece: int(piece.name.rpartition(".part")[2])):
                file.write(piece.read_bytes())
        joined.append(whole)
    return joined


def _is_there(wheel: Path) -> bool:
    name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _pip(wheels: Sequence[Path], site: Path) -> str:
    """Pip's last words where it fails; empty where it does not."""
    words = [
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--no-build-isolation",
        "--upgrade",
        "--target",
        str(site),
    ]
    command = [sys.executable, "-m", "pip", "install", "-q", *words, *map(str, wheels)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"pip took more than {LIMIT_S:.0f} s"
    return (
        done.stderr.strip()[-600:] or f"pip ended with status {done.returncode}"
        if done.returncode
        else ""
    )
