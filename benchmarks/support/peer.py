"""Installation of verl, the peer, next to the benchmarks and never in the project's environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "peer"
# Installed without dependencies, which would replace the project's torch, ray and numpy.
PACKAGES = (
    "verl==0.9.1",
    "tensordict==0.10.0",
    "pyvers==0.2.3",
    "cloudpickle==3.1.2",
    "codetiming==1.4.0",
    "pandas==3.1.1",
    "python-dateutil==4.0.0",
    "six==1.17.0",
    "importlib_metadata==10.2.0",
    "zipp==4.1.2",
)
NAME = PACKAGES[0].replace("==", " ")


def install() -> Path:
    """Return the folder that contains the peer, which is installed on first use.

    It is appended to the import path, so that it does not shadow any of the project's packages.
    """
    marker = FOLDER / "complete"
    listed = "\n".join(PACKAGES)
    if not marker.exists() or marker.read_text() != listed:
        shutil.rmtree(FOLDER, ignore_errors=True)
        print(f"installing {NAME} into {FOLDER} ...", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(FOLDER), *PACKAGES], check=True)
        marker.write_text(listed)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return FOLDER


def be_importable() -> None:
    """Let processes that are started from now on import the benchmarks and the peer."""
    folders = [str(FOLDER.parents[2]), str(FOLDER)]
    if given := os.environ.get("PYTHONPATH"):
        folders.insert(0, given)
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
