"""Check an environment against lock files: `python requirements/verify.py LANE LOCK...`. Imports
none of the packages it checks.

Fails when a locked package is absent or has another version, and on the cpu lane when anything of
CUDA came in.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path


def main(lane: str, locks: list[str]) -> int:
    """Print every problem; 0 when there is none."""
    problems = [line for lock in locks for line in lock_problems(Path(lock))]
    if lane == "cpu":
        problems += cuda_problems()
    for line in problems:
        print(f"setup: {line}", file=sys.stderr)
    return 1 if problems else 0


def lock_problems(lock: Path) -> list[str]:
    """Lines for the packages of `lock` that are not installed exactly as locked. A build label
    (`+cpu`) does not count."""
    found = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        name, _, wanted = line.partition("==")
        if line.startswith("#") or not wanted:
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed; {lock} asks for {wanted}")
            continue
        if installed.split("+")[0] != wanted.split("+", maxsplit=1)[0]:
            found.append(f"{name} {installed} is installed; {lock} asks for {wanted}")
    return found


def cuda_problems() -> list[str]:
    """Lines for what has no place on the cpu lane: nvidia packages and a torch built for CUDA."""
    names = {
        re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower() for dist in metadata.distributions()
    }
    found = [
        f"{name} is installed, but the cpu lane must hold no NVIDIA package"
        for name in sorted(names)
        if name.startswith("nvidia")
    ]
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return [*found, "torch is not installed"]
    build = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    if build.get("cuda") is not None:
        found.append(
            f"torch {build['__version__']} is built for CUDA {build['cuda']}, but the cpu lane "
            "needs a CPU build: add a source of CPU builds to pip's configuration "
            "(PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS), then `make distclean setup`"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
