"""A tool that runs Python programs in the sandbox (`rewards.sandbox`) and returns their output."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hybridflow.agents.tools.base import tool
from hybridflow.rewards.sandbox import ENDED, ProgramResult, Sandbox

_lock = threading.Lock()
# idle sandboxes; each runs one program at a time, and new ones are started as needed
_idle: list[Sandbox] = []
# A sandbox ends with the thread that started it (`process.children.die_with_parent`), and a call's
# thread ends with the call.
_starter = ThreadPoolExecutor(1, "sandboxes")


@tool("python")
def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Raises:
        ResourceError: this machine does not support the sandbox.
    """
    result = _result(code)
    # limits are reported to the program, so this sandbox was killed from outside
    if result.why == ENDED:
        result = _result(code, fresh=True)
    if result.why == ENDED:
        return "error: the sandbox exited twice while running this program"
    if result.why:
        return f"{result.stdout}error: the program exceeded its {result.why} limit"
    return (
        result.stdout
        if result.code == 0
        else f"{result.stdout}error: {result.stderr.strip()[-2000:]}"
    )


def _result(code: str, fresh: bool = False) -> ProgramResult:
    with _sandbox(fresh) as sandbox:
        return sandbox.run(code)


@contextmanager
def _sandbox(fresh: bool) -> Iterator[Sandbox]:
    with _lock:
        found = _idle.pop() if _idle and not fresh else None
    sandbox = found or _starter.submit(Sandbox).result()
    try:
        yield sandbox
    except BaseException:
        sandbox.close()
        raise
    if sandbox.has_ended:
        return
    with _lock:
        _idle.append(sandbox)
