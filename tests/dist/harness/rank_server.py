"""A process that has loaded what ranks need and forks them: torch and Megatron cost an interpreter
4 s of a core, a fork milliseconds.

`python -m tests.dist.harness.rank_server MODULE...` loads the modules. Each line of JSON on its
input starts ranks (`ranks.run_ranks` says what is in it); when all have ended, a line on its output
says how: exit codes by rank, null where the deadline ended it. It ends with its input.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

from hybridflow.process.children import die_with_parent


def serve(modules: list[str]) -> None:
    """Load `modules`; then one order after another."""
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    of_loading = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    # ranks share what is loaded: a collection in one of them neither walks nor copies it
    gc.freeze()
    for line in sys.stdin:
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, (
            f"{threads} threads: a fork would have one of them, and locks that the others hold"
        )
        print(json.dumps(_ends(json.loads(line), of_loading)), flush=True)


def _ends(order: dict[str, Any], of_loading: dict[str, str]) -> dict[str, int | None]:
    running = {_fork(order, rank, of_loading): rank for rank in order["ranks"]}
    ends: dict[str, int | None] = {}
    while running:
        late = time.monotonic() > order["deadline"]  # the clock is the system's
        for pid, rank in list(running.items()):
            if late:
                # it may not have got as far as its session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # with whatever it started
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ends[rank] = None if late else os.waitstatus_to_exitcode(status)
                del running[pid]
        time.sleep(0.01)
    return ends


def _fork(order: dict[str, Any], rank: str, of_loading: dict[str, str]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(server)  # a test that is killed leaves no ranks that wait for each other
        _begin(**order["ranks"][rank])
        os.environ.update(of_loading)
        module, name = order["function"].split(":")
        result = getattr(importlib.import_module(module), name)(**order["arguments"])
        print("RESULT " + json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo threads of a torn-down world may otherwise linger


def _begin(environ: dict[str, str], out: str, err: str) -> None:
    """Be what a new interpreter would be: own session, files, environment and random states."""
    os.setsid()
    writing = os.O_WRONLY | os.O_CREAT
    for name, number, flags in ((os.devnull, 0, os.O_RDONLY), (out, 1, writing), (err, 2, writing)):
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    # Python seeds its own generators after a fork; these two have begun with a random seed that all
    # forks would share
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


if __name__ == "__main__":
    serve(sys.argv[1:])
