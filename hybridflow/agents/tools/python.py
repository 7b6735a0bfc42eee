"""Python in the sandbox of `rewards`: a program, and what it printed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridflow.agents.tools.base import tool
from hybridflow.rewards.sandbox import Sandbox

_lock = threading.Lock()
_idle: list[Sandbox] = []  # each runs one program at a time; as many are started as are in use at once


@tool("python")
def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Raises:
        ResourceError: this machine forbids what the sandbox needs.
    """
    with _sandbox() as sandbox:
        result = sandbox.run(code)
    if result.why:
        return f"{result.stdout}error: the program reached its limit of {result.why}"
    return result.stdout if result.code == 0 else f"{result.stdout}error: {result.stderr.strip()[-2000:]}"


@contextmanager
def _sandbox() -> Iterator[Sandbox]:
    with _lock:
        found = _idle.pop() if _idle else None
    sandbox = found or Sandbox()
    try:
        yield sandbox
    except BaseException:
        sandbox.close()
        raise
    with _lock:
        _idle.append(sandbox)
