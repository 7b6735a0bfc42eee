"""Run a function on N ranks, each a process of its own, joined over loopback; used by tests of collectives without Ray."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from hybridflow.children import die_with_parent


def free_port() -> int:
    """A loopback port below the ephemeral range, so that no other process is handed it meanwhile."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(world: int, function: str, timeout_s: float = 240.0, **arguments: Any) -> list[Any]:
    """Call `module:name(**arguments)` on every rank; returns what each returned (JSON), by rank. Fails with the ranks' output."""
    root, deadline = Path(__file__).parents[2], time.monotonic() + timeout_s
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
              "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "PARENT_PID": str(os.getpid())}  # fmt: skip
    command = [sys.executable, "-m", "tests.dist.ranks", function, json.dumps(arguments)]
    results, failures = [], []
    with contextlib.ExitStack() as files:
        # not pipes: a rank that fills its pipe would stop, and with it all that wait for it, while another is waited for
        outputs = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in ("out", "err")] for _ in range(world)]
        processes = [
            subprocess.Popen(
                command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=root, stdout=out, stderr=err,
                start_new_session=True,
            )
            for rank, (out, err) in enumerate(outputs)
        ]  # fmt: skip
        for rank, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
                problem = f"exited with {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
                process.wait()
                problem = f"did not end within {timeout_s} s"
            if problem:
                failures.append(f"rank {rank} {problem}\n{_text(err)[-3000:]}")
            else:
                results.append(json.loads(_text(out).splitlines()[-1].removeprefix("RESULT ")))
    assert not failures, "\n".join(failures)
    return results


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _main() -> None:
    die_with_parent(int(os.environ["PARENT_PID"]))  # a test that is killed leaves no ranks that wait for each other
    module, name = sys.argv[1].split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # gloo threads of a torn-down world may otherwise linger


if __name__ == "__main__":
    _main()
