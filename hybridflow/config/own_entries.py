"""Checks of custom entries, `path/to/file.py:name`, for every key that refers to a registry: the
file exists, can be imported in a separate process, and registers an entry of the right kind. The
checks run before anything starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config import derived
from hybridflow.config.keys import VERIFIER, Entry, all_keys, value_at
from hybridflow.config.registry import Registry, is_user_entry
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.process.secret import without_credentials

_IMPORT_S = 120.0  # for all files together; importing torch takes seconds
# imported by `check_entries`
_CHECKED_HERE = (
    "algorithm.adv_estimator",
    "algorithm.flow",
    "actor.policy_loss",
    "trainer.loggers",
)
# an engine whose `generate` has this argument can return supports
_SUPPORT = "with_support"
_MARK = (
    "\nown entries: "  # marks the start of the result, because a user's file may print other text
)


def named(config: RunConfig) -> Iterator[tuple[str, Entry, str]]:
    """Yield (key, registry, value) for each entry defined in a user file."""
    for key, kind in all_keys(RunConfig):
        if kind.entry is None:
            continue
        value = value_at(config, key)
        for one in value if kind.is_list else (value,):
            if one is not None and is_user_entry(one):
                yield key, kind.entry, one
    for name in map(str, config.reward.combine):
        if is_user_entry(name):
            yield "reward.combine", VERIFIER, name


def code_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, value) for each setting that makes a run execute code from outside this package:
    Python files, programs, or an existing cluster."""
    yield from ((key, value) for key, _, value in named(config))
    single = {
        "model.family": config.model.family
        if config.model.family and is_user_entry(config.model.family)
        else None,
        "data.dataset_class.path": config.data.dataset_class.path,
        "reward.path": config.reward.path,
        "rollout.python": config.rollout.python,
        "cluster.address": config.cluster.address,
    }
    yield from ((key, value) for key, value in single.items() if value is not None)
    for name, server in config.rollout.agent.mcp_servers.items():
        yield f"rollout.agent.mcp_servers.{name}", json.dumps(server, default=str)


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each unusable entry. Starts a process if there are custom entries."""
    asked = []
    for key, entry, value in named(config):
        path = Path(value.rpartition(":")[0])
        if not path.is_file():
            yield (
                f"{key}={value}: file {str(path)!r} not found (looked in {Path.cwd()}); correct "
                "the path"
            )
        elif key not in _CHECKED_HERE:
            needs = [_SUPPORT] if key == "rollout.engine" and derived.needs_support(config) else []
            asked.append((key, entry.package, value, *needs))
    if asked:
        yield from _imported(asked)


def _imported(asked: Sequence[Sequence[str]]) -> list[str]:
    """Import these entries in a separate process and return the problems it reports. An entry is
    (key, package, value, required arguments of an engine's `generate`)."""
    command = [sys.executable, "-P", "-m", "hybridflow.config.own_entries", json.dumps(asked)]
    values = ", ".join(f"{key}={value}" for key, _, value, *_ in asked)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=without_credentials(),
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            (
                f"{values}: importing took more than {_IMPORT_S:.0f} s; avoid long-running code at "
                "import time"
            )
        ]
    _, mark, said = done.stdout.rpartition(_MARK)
    if not mark:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return [f"{values}: the process that imports them failed: {last}"]
    found: list[str] = json.loads(said)
    return found


def main(asked: Sequence[Sequence[str]]) -> list[str]:
    """Import all entries and return one line for each unusable one."""
    found = []
    for key, package, value, *needs in asked:
        try:
            generate = getattr(_registry_of(package).get(value), "generate", None)
            if (
                needs
                and callable(generate)
                and not {*needs} <= inspect.signature(generate).parameters.keys()
            ):
                found.append(
                    f"{key}={value}: its `generate` has no argument {needs[0]}, so it cannot "
                    "report the candidates that a token was sampled from, and the trainer cannot "
                    "compute its log-prob; set rollout.sampling.top_k=-1, top_p=1 and min_p=0"
                )
        except ConfigError as error:
            if not _lacks_what_nodes_have(error.__cause__):
                found.append(
                    str(error) if str(error).startswith(key) else f"{key}={value}: {error}"
                )
    return found


def _registry_of(package: str) -> Registry[Any]:
    """Return the registry for a package of built-in entries."""
    for module in (f"{package}.base", package):
        if importlib.util.find_spec(module) is None:
            continue
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, Registry) and value.package == package:
                return value
    raise AssertionError(f"no registry in {package}")


def _lacks_what_nodes_have(cause: BaseException | None) -> bool:
    """Return True if an import failed only because of a missing library that is not required on a
    submit-only machine."""
    return isinstance(cause, ModuleNotFoundError) and importlib.util.find_spec("torch") is None


if __name__ == "__main__":
    print(f"{_MARK}{json.dumps(main(json.loads(sys.argv[1])))}")
