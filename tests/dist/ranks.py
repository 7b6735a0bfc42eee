"""Run a function on N ranks, each a process of its own, joined over loopback; used by tests of collectives without Ray."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from hybridflow.children import die_with_parent


def free_port() -> int:
    """A loopback port below the ephemeral range, so that no other process is handed it meanwhile."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def run_ranks(world: int, function: str, timeout_s: float = 240.0, **arguments: Any) -> list[Any]:
    """Call `module:name(**arguments)` on every rank; returns what each returned (JSON), by rank. Fails with the ranks' output."""
    port = free_port()
    root = Path(__file__).parents[2]
    processes = []
    for rank in range(world):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo",
               "PARENT_PID": str(os.getpid())}  # fmt: skip
        command = [sys.executable, "-m", "tests.dist.ranks", function, json.dumps(arguments)]
        processes.append(
            subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
    results, failures = [], []
    for rank, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it started, or the pipes would stay open
            out, err = process.communicate()
            failures.append(f"rank {rank} did not end within {timeout_s} s\n{err[-3000:]}")
            continue
        if process.returncode:
            failures.append(f"rank {rank} exited with {process.returncode}\n{err[-3000:]}")
        else:
            results.append(json.loads(out.splitlines()[-1].removeprefix("RESULT ")))
    assert not failures, "\n".join(failures)
    return results


def _main() -> None:
    die_with_parent(int(os.environ["PARENT_PID"]))  # a test that is killed leaves no ranks that wait for each other
    module, name = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # gloo threads of a torn-down world may otherwise linger


if __name__ == "__main__":
    _main()
