"""Problems in the environment that would prevent a run or surprise its user. `hybridflow doctor`
lists all of them; errors prevent a run from starting."""

from __future__ import annotations

import locale
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from hybridflow.errors import ResourceError
from hybridflow.process.surroundings import proxies

# import name -> distribution, for libraries that a run must import from its own environment
LIBRARIES = {
    name: name
    for name in ("torch", "ray", "transformers", "numpy", "pyarrow", "hydra", "omegaconf")
}
LIBRARIES |= {"hydra": "hydra-core"}
_LONG = 40  # temporary folders with longer names may leave no room for socket paths


@dataclass(frozen=True)
class Obstacle:
    """A detected problem. If it is an error, no run can start. `remedy` is empty if no action is
    needed.
    """

    topic: str
    level: Literal["ok", "unused", "warning", "error"]
    what: str
    remedy: str = ""


def obstacles(libraries: Sequence[str] = tuple(LIBRARIES)) -> list[Obstacle]:
    """Return all detected problems. `libraries` lists the libraries that the run imports."""
    return [*_folders(), *_encoding(), *_import_path(libraries), *_variables()]


def require_none(libraries: Sequence[str]) -> None:
    """Raise a ResourceError with the problems and their remedies if a run that imports these
    libraries could not start.
    """
    found = [one for one in obstacles(libraries) if one.level == "error"]
    if found:
        raise ResourceError("\n".join(f"{one.topic}: {one.what}; {one.remedy}" for one in found))


def _folders() -> Iterator[Obstacle]:
    wanted = os.environ.get("TMPDIR")
    try:
        used = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield Obstacle("TMPDIR", "error", str(error), "set TMPDIR to a writable folder")
        return
    if wanted and Path(used) != Path(wanted).absolute():
        yield Obstacle(
            "TMPDIR",
            "warning",
            f"{wanted} is not writable; using {used}",
            "create it, or set TMPDIR to another folder",
        )
    elif len(os.fsencode(used)) > _LONG:
        yield Obstacle(
            "TMPDIR", "unused", f"{used} is too long for unix sockets; they are created in /tmp"
        )
    home = os.environ.get("HOME")
    if not home or not os.access(home, os.W_OK | os.X_OK) or not os.path.isdir(home):
        said = f"{home} is not writable" if home else "is not set"
        yield Obstacle(
            "HOME", "unused", f"{said}: libraries read no settings and cache no files there"
        )


def _encoding() -> Iterator[Obstacle]:
    found = locale.getpreferredencoding(False)
    if found.lower().replace("-", "") != "utf8":
        what = f"Python reads and writes text as {found}, but torch's files are UTF-8"
        yield Obstacle("encoding", "error", what, "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1)")


def _import_path(libraries: Sequence[str]) -> Iterator[Obstacle]:
    """Find modules in PYTHONPATH that would shadow the standard library or packages of the
    environment."""
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        remedy = f"remove {folder} from PYTHONPATH"
        if hidden := _names_in(folder) & sys.stdlib_module_names:
            yield Obstacle(
                "PYTHONPATH",
                "error",
                f"{folder} contains {_listed(hidden)}, which shadows Python's own",
                remedy,
            )
        for name in libraries:
            theirs = PathFinder.find_spec(name, [folder])
            ours = PathFinder.find_spec(
                name, [entry for entry in sys.path if entry not in ("", folder)]
            )
            if theirs is None or theirs.origin is None or ours is None or ours.origin is None:
                continue
            versions = []
            for found in (theirs, ours):
                versions.append(_version(name, Path(found.origin or "").parents[1]))
            if "" in versions or versions[0] != versions[1]:
                what = (
                    f"{folder} contains {name} {versions[0] or 'of unknown version'}, which "
                    f"shadows {name} {versions[1]}"
                )
                yield Obstacle("PYTHONPATH", "error", f"{what} of this environment", remedy)
    if sys.flags.safe_path:
        return
    try:
        hidden = _names_in(os.getcwd()) & sys.stdlib_module_names
    except OSError as error:
        yield Obstacle(
            "working directory",
            "error",
            f"cannot be read ({error.strerror})",
            "change to another folder",
        )
        return
    if hidden:
        what = (
            f"{_listed(hidden)} share names with Python's own modules; the processes of a run do "
            "not import them"
        )
        yield Obstacle("working directory", "unused", what)


def _variables() -> Iterator[Obstacle]:
    if found := proxies(os.environ):
        yield Obstacle(
            "proxy", "ok", f"{', '.join(found)}: not used for this machine's own addresses"
        )
    if address := os.environ.get("RAY_ADDRESS"):
        what = f"{address} is ignored: a run reads only cluster.address"
        yield Obstacle(
            "RAY_ADDRESS", "warning", what, f"unset it, or set cluster.address={address}"
        )


def _names_in(folder: str) -> set[str]:
    """Return the names of the modules and packages in a folder."""
    if not os.path.isdir(folder):
        return set()
    with os.scandir(folder) as entries:
        names: set[str] = set()
        for entry in entries:
            if entry.name.endswith(".py") or (
                entry.is_dir() and os.path.isfile(f"{entry.path}/__init__.py")
            ):
                names.add(entry.name.removesuffix(".py"))
        return names


def _version(name: str, folder: Path) -> str:
    """Return the version of the library in this folder; empty if unknown."""
    for found in metadata.distributions(name=LIBRARIES[name], path=[str(folder)]):
        return str(found.version)
    return ""


def _listed(names: set[str]) -> str:
    return ", ".join(f"{name}.py" for name in sorted(names)[:5])
