"""What runs inside an actor: sets the process up as one rank, then holds the worker and calls its methods. Needs no Ray itself."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.children import die_with_parent
from hybridflow.dispatch import WorkerContext
from hybridflow.errors import HybridFlowError

_PORTS = range(20000, 32768)  # below the ephemeral range, where no outgoing connection can take the port before it is bound


@dataclass(frozen=True)
class Failure:
    """An exception of a worker, as a value: it reaches the driver even where the exception itself cannot be pickled."""

    kind: str
    message: str
    ours: bytes | None  # the pickled (type, state) of a HybridFlowError


@dataclass(frozen=True)
class HostInfo:
    """Which process a rank is, and a port that was free on its node."""

    pid: int
    hostname: str
    free_port: int


class Host:
    """One rank. Methods are called in the order: `describe`, `set_up`, `construct`, then `call` any number of times."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._log: Any = None

    def describe(self, address: str) -> HostInfo:
        """Process id, host name and a free TCP port at `address`."""
        return HostInfo(os.getpid(), socket.gethostname(), free_port(address))

    def set_up(self, log_path: Path, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Environment, import path, log file and crash reports. Comes before the worker class is unpickled, which may import torch."""
        die_with_parent()  # the raylet: a worker stuck in a collective would outlive it
        os.environ.update(env)
        sys.path += [entry for entry in path if entry not in sys.path]  # Ray hands on the driver's folder and script only
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115  stays open as long as the process
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(self._log, all_threads=True)
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)  # the driver asks a hanging rank where it is

    def construct(self, worker_class: type, context: WorkerContext, args: Sequence[Any]) -> Failure | None:
        """Build the worker."""
        try:
            self._worker = worker_class(context, *args)
        except Exception as error:
            return failure(error)
        return None

    def call(self, method: str, keywords: Sequence[str], *values: Any) -> Any:
        """Run a method: the last `len(keywords)` values are keyword arguments. A coroutine is awaited. Errors come back as `Failure`."""
        positional = len(values) - len(keywords)
        try:
            result = getattr(self._worker, method)(*values[:positional], **dict(zip(keywords, values[positional:], strict=True)))
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except Exception as error:
            return failure(error)


async def _awaited(value: Any) -> Any:
    return await value


def failure(error: Exception) -> Failure:
    """The error as a value; its traceback goes to the log of the rank."""
    traceback.print_exception(error)
    sys.stderr.flush()
    ours = None
    if isinstance(error, HybridFlowError):
        try:
            # Not the exception as it is: unpickling would call a constructor that composes its message a second time.
            ours = pickle.dumps((type(error), error.args, error.__dict__))
        except Exception as unpicklable:
            print(f"the error above travels as text only: {unpicklable}", file=sys.stderr)
    return Failure(type(error).__qualname__, str(error), ours)


def free_port(address: str) -> int:
    """A TCP port below the ephemeral range that is free at `address` now."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue  # taken: try another
            return port
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop} on {address}")
