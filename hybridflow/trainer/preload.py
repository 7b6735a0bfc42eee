"""Fork servers for a job on one machine without CUDA. The modules of ranks and engines are imported
once, in the background, while the driver starts.

One server loads torch. The engines' workers are forked from it, and so are a second and a third
server, which load the training backend and the engines' library. All these processes share torch's
memory. If there is no server (on another node, with CUDA, or after the server has exited), a
process imports the modules itself.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from hybridflow.config.keys import ENGINE
from hybridflow.config.schema import RunConfig
from hybridflow.process.children import die_with_parent
from hybridflow.process.fork_client import address_of
from hybridflow.process.importing import without_compiler

_TORCH = ("torch._dynamo", "torch.distributed.tensor", "hybridflow.workers.rollout")
_RANKS = {
    "megatron": (
        "hybridflow.workers.policy",
        "hybridflow.workers.model_role",
        "hybridflow.mcore.backend",
    ),
    "fsdp": ("hybridflow.workers.policy", "hybridflow.fsdp.policy"),
}


class Preload:
    """A job's fork servers, named after the modules that they preload: "torch", "ranks" and
    "engines". They are stopped at the end of the `with` block, and always exit with this
    process."""

    def __init__(self, config: RunConfig, *, with_engines: bool, with_ranks: bool = True) -> None:
        """Start the servers in the background; none if the job has one process, joins a cluster or
        uses CUDA. If there are no ranks, only the server that loads the engines' library may be
        started.
        """
        self._names: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if config.cluster.address is None and not config.cluster.in_process and _is_without_cuda():
            modules = modules_of(config, with_engines=with_engines)
            if not with_ranks:  # the engines' workers are threads of this process
                modules = {name: modules[name] for name in ("engines",) if name in modules}
            if modules:
                self._start(modules)

    def name(self, loaded: str) -> str:
        """Return the name of the server that has loaded these modules; "" if there is none."""
        return self._names.get(loaded, "")

    def _start(self, modules: dict[str, tuple[str, ...]]) -> None:
        listeners = []
        words = list[str]()
        for loaded, names in modules.items():
            self._names[loaded] = secrets.token_hex(8)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address_of(self._names[loaded]))
            listener.listen(64)  # early clients wait until everything is loaded
            words += [*(["/"] if words else []), str(listener.fileno()), *names]
            listeners.append(listener)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hybridflow.process.fork_server", *words],
            # thread pools do not survive a fork; each fork sets its own thread count
            env={**os.environ, **without_compiler(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno() for listener in listeners],
            start_new_session=True,
            # safe: the driver is single-threaded here
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
        for listener in listeners:
            listener.close()

    def __enter__(self) -> Preload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def modules_of(config: RunConfig, *, with_engines: bool) -> dict[str, tuple[str, ...]]:
    """Return {server: modules that it preloads}. The first server starts from scratch; all others
    are forked from it.
    """
    modules = {"torch": _TORCH, "ranks": _RANKS[config.actor.backend]}
    engine = f"{ENGINE.package}.{config.rollout.engine}.preload"
    if with_engines and config.rollout.engine in ENGINE.names() and find_spec(engine) is not None:
        modules["engines"] = (engine,)
    return modules


def _is_without_cuda() -> bool:
    """Return True if this machine has no CUDA driver, without importing torch."""
    return os.environ.get("HYBRIDFLOW_PLATFORM") == "cpu" or not Path("/dev/nvidiactl").exists()
