"""Run a function on N ranks, each a process of its own, joined over loopback; used by tests of
collectives without Ray."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.device.platform import Kind
from tests.dist.harness.children import start_child

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0  # for a server to say that the deadline of its ranks has passed
# What ranks find loaded. Loading `hybridflow.mcore` replaces torch's CUDA functions (`cpu_compat`):
# not for ranks that do without Megatron
NOTHING: tuple[str, ...] = ()
TORCH = ("torch.distributed",)
FSDP = (
    "hybridflow.fsdp.policy",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
MEGATRON = (
    "hybridflow.mcore.policy",
    "hybridflow.mcore.value_model",
    "hybridflow.mcore.checkpoint",
    "hybridflow.mcore.hf_export",
)
# the rest of the environment is a server's too
_CHANGING = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_PORT",
    "PYTEST_CURRENT_TEST",
)


_given: set[int] = set()


def free_port() -> int:
    """A loopback port below the ephemeral range, so that no other process is handed it meanwhile,
    and of which this one has not heard before."""
    while True:
        port = random.randrange(20000, 32000)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def import_path() -> str:
    """PYTHONPATH of ranks: the repository, then the caller's own, where a test puts another
    Megatron."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run_ranks(
    world: int,
    function: str,
    timeout_s: float = 240.0,
    loaded: tuple[str, ...] = MEGATRON,
    platform: Kind = "cpu",
    **arguments: Any,
) -> list[Any]:
    """Call `module:name(**arguments)` on every rank; returns what each returned (JSON), by rank.
    Fails with the ranks' output.

    A rank is a fork of a process that has done nothing but load the modules `loaded`; a rank that
    measures its own memory loads them itself (`loaded=NOTHING`). Otherwise it is like a new
    interpreter: environment, files, session and random states are its own. Ranks are on the CPU,
    whatever the machine has, unless another `platform` is named.
    """
    deadline = time.monotonic() + timeout_s
    common = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": import_path(),
        "GLOO_SOCKET_IFNAME": "lo",
        "HYBRIDFLOW_PLATFORM": platform,
        **({"CUDA_VISIBLE_DEVICES": ""} if platform == "cpu" else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        # files, not pipes: a rank that fills its pipe would stop, and with it all that wait for it,
        # while another is waited for
        files = [
            [Path(folder, f"{rank}.{name}") for name in ("out", "err")] for rank in range(world)
        ]
        orders: list[dict[str, Any]] = [{} for _ in range(_SEEDS)]
        for rank, (out, err) in enumerate(files):
            environ = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            orders[_server_of(rank)][str(rank)] = {
                "environ": environ,
                "out": str(out),
                "err": str(err),
            }
        ends: dict[str, int | None] = {}
        with _servers(loaded, os.environ | common) as servers:
            asked = [
                (server, ranks) for server, ranks in zip(servers, orders, strict=True) if ranks
            ]
            for server, ranks in asked:
                server.ask(
                    {
                        "function": function,
                        "arguments": arguments,
                        "ranks": ranks,
                        "deadline": deadline,
                    }
                )
            for server, _ in asked:
                ends |= server.answer(deadline + PATIENCE_S)
        failures = [
            (
                f"rank {rank} "
                f"{f'did not end within {timeout_s} s' if end is None else f'exited with {end}'}\n"
                f"{_end_of(files[int(rank)][1])}"
            )
            for rank, end in sorted(ends.items(), key=lambda item: int(item[0]))
            if end != 0
        ]
        assert not failures, "\n".join(failures)
        return [
            json.loads(out.read_text().splitlines()[-1].removeprefix("RESULT ")) for out, _ in files
        ]


def _end_of(file: Path) -> str:
    return file.read_text()[-3000:] if file.exists() else ""


class _Server:
    """A `rank_server` of ours."""

    def __init__(self, loaded: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the server
        command = [sys.executable, "-m", "tests.dist.harness.rank_server", *loaded]
        self.process = start_child(
            command,
            env=environ,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
        )

    def ask(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says what it said at its end
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, int | None]:
        assert self.process.stdout is not None
        ready, _, _ = select.select(
            [self.process.stdout], [], [], max(deadline - time.monotonic(), 0)
        )
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.said.seek(0)
            raise AssertionError(
                "the server of ranks "
                f"{'has ended' if ready else 'does not answer'}\n{self.said.read()[-3000:]}"
            )
        answer: dict[str, int | None] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End it and its ranks."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout, self.said):
            with contextlib.suppress(BrokenPipeError):
                end.close()  # type: ignore[union-attr]


# Two a kind: strings hash alike in forks of one process, and ranks whose collectives follow the
# order of a set must not agree by chance.
_SEEDS = 2
_running: dict[tuple[str, ...], tuple[dict[str, str], list[_Server]]] = {}


def _server_of(rank: int) -> int:
    """Ranks whose numbers differ by a power of two, neighbours in every dimension of a mesh, are of
    different servers."""
    return rank.bit_count() % _SEEDS


@contextlib.contextmanager
def _servers(loaded: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[list[_Server]]:
    """The servers of this kind under this environment, which stay for the next call; not if
    something goes wrong between them and us."""
    # importing Megatron asks for CUDA devices, and no fork may after that
    loaded = NOTHING if Path("/dev/nvidiactl").exists() else loaded
    # Ray's driver adds variables of its own to the tests', which nothing that ranks load reads
    same = {
        name: value
        for name, value in environ.items()
        if name not in _CHANGING and not name.startswith("RAY_")
    }
    # what is loaded may have read a variable that is another now
    if loaded in _running and _running[loaded][0] != same:
        _stop(loaded)
    if loaded not in _running:
        _running[loaded] = same, [_Server(loaded, same) for _ in range(_SEEDS)]
    try:
        yield _running[loaded][1]
    except BaseException:
        _stop(loaded)
        raise


def _stop(loaded: tuple[str, ...]) -> None:
    for server in _running.pop(loaded)[1]:
        server.stop()


@atexit.register
def _stop_all() -> None:
    for loaded in list(_running):
        _stop(loaded)
