"""Recording of a run's environment: versions, machine size and commit. Host, user and folder names
are omitted so that a run folder can be shared."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import hybridflow

PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "hydra-core",
    "omegaconf",
    "triton",
    "flash-attn",
    "transformer-engine",
)
_PACKAGE_FOLDER = Path(hybridflow.__file__).parent
_GIB = 2**30


def describe_environment() -> dict[str, Any]:
    """Return versions, platform, cores, memory, accelerators and git commit as plain JSON values.
    Unknown values are null or omitted."""
    return {
        "hybridflow": hybridflow.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
        "accelerators": query_gpus()[0],
        "packages": package_versions(),
        "git": _git(_PACKAGE_FOLDER),
    }


def processor_model() -> str:
    """Return the model of the processor."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return found[1]
    return platform.processor()


def write_environment(run_dir: str | Path) -> Path:
    """Write `environment.json` into a run folder."""
    path = Path(run_dir) / "environment.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe_environment(), indent=2) + "\n", encoding="utf-8")
    return path


def note_in_environment(run_dir: str | Path, key: str, facts: Mapping[str, str]) -> None:
    """Add facts to `environment.json` that become known only after the run has started."""
    path = Path(run_dir) / "environment.json"
    found = json.loads(path.read_text(encoding="utf-8")) | {key: dict(facts)}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect a run's results."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def query_gpus() -> tuple[list[str], str]:
    """Return `name, memory, driver` of each GPU from nvidia-smi (importing torch would take
    seconds), and an error message.

    The message comes from the driver; it is empty if nvidia-smi is missing or succeeds.
    """
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if asked.returncode:
        said = " ".join(f"{asked.stdout} {asked.stderr}".split())
        return [], f"nvidia-smi: {said or f'exited with status {asked.returncode}'}"
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()], ""


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that tracks `folder`; None for an installed package, even
    if it is inside another checkout."""
    if _run(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]) is None:
        return None
    commit = _run(["git", "-C", str(folder), "rev-parse", "HEAD"])
    changed = _run(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": commit.strip() if commit else None, "modified": bool(changed)}


def _run(command: list[str]) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
