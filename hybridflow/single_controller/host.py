"""What runs inside an actor: sets the process up as one rank, then holds the worker and calls its methods. Needs no Ray
itself."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.dispatch import WorkerContext
from hybridflow.errors import HybridFlowError, to_json
from hybridflow.process.children import die_with_parent
from hybridflow.single_controller.pieces import Header, Request

UPSTREAM = "UpstreamFailure"  # the kind of a failure that only passes on that of an argument
# below the ephemeral range, where no outgoing connection can take the port before it is bound
_PORTS = range(20000, 32768)


@dataclass(frozen=True)
class Failure:
    """An exception of a worker, as a value: it reaches the driver even where the exception itself cannot be pickled."""

    kind: str
    message: str
    ours: str | None  # one of our own errors, see `errors.to_json`


@dataclass(frozen=True)
class HostInfo:
    """Which process a rank is, and a port that was free on its node."""

    pid: int
    hostname: str
    free_port: int


@dataclass(frozen=True)
class Identity:
    """What a driver that joins a detached group must know of a rank."""

    role: str
    world_size: int
    node: str
    log_path: Path
    pid: int


class Host:
    """One rank. Methods are called in the order: `describe`, `set_up`, `construct`, then `call` any number of times."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._log: Any = None
        self._identity: Identity | None = None

    def describe(self, address: str) -> HostInfo:
        """Process id, host name and a free TCP port at `address`."""
        return HostInfo(os.getpid(), socket.gethostname(), free_port(address))

    def identity(self) -> Identity | None:
        """What `set_up` was told; None before it."""
        return self._identity

    def set_up(self, role: str, context: WorkerContext, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Environment, import path, log file and crash reports. Comes before the worker class is unpickled, which may
        import torch."""
        die_with_parent()  # the raylet: a worker stuck in a collective would outlive it
        log_path = context.log_path
        self._identity = Identity(role, context.world_size, context.node, log_path, os.getpid())
        os.environ.update(env)
        sys.path += [
            entry for entry in path if entry not in sys.path
        ]  # Ray hands on the driver's folder and script only
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

    def call(self, request: Request, *objects: Any) -> Any:
        """Run a method. A coroutine is awaited. Errors come back as `Failure`, also those of an object sent along."""
        upstream = next((value for value in objects if isinstance(value, Failure)), None)
        if upstream is not None:
            return Failure(UPSTREAM, upstream.message, None)
        try:
            args, kwargs = request.arguments(objects)
            result = getattr(self._worker, request.method)(*args, **kwargs)
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except Exception as error:
            return failure(error)

    def call_stored(self, together: Sequence[Sequence[str]], inline_bytes: int, request: Request, *objects: Any) -> Any:
        """`call` for a method that returns a batch: a `Header` and then a value, and so an object, for each of the
        groups of columns.

        Without groups (a rank whose result is not collected) the result is dropped. `inline_bytes`: see `Header.of`.
        """
        result = self.call(request, *objects)
        if not together:
            return result if isinstance(result, Failure) else None
        if not isinstance(result, DataProto):
            return (result, *(result for _ in together))
        # the driver says what is wrong with it
        if sorted(result.columns) != sorted(name for names in together for name in names):
            return (result, *(None for _ in together))
        return (Header.of(result, inline_bytes), *(_without_meta(result.select(names)) for names in together))


def short_name(method: str) -> str:
    """The method of a host that `with_short_calls` made which calls `method` without arguments."""
    return f"run_{method.replace('.', '_')}"


def with_short_calls(methods: Iterable[str]) -> type[Host]:
    """`Host` with a method of its own for the call of each worker method without arguments.

    Such a call costs what a bare Ray call does. With an argument Ray builds and checks a signature and serializes two
    values, each a rank.
    """
    return type("Host", (Host,), {short_name(method): _short_call(method) for method in methods})


def _short_call(method: str) -> Callable[[Host], Any]:
    def run(self: Host) -> Any:
        return self.call(Request(method, (), ()))

    return run


def _without_meta(batch: DataProto) -> DataProto:
    return DataProto(dict(batch.items()), {}, batch.bfloat16)


async def _awaited(value: Any) -> Any:
    return await value


def failure(error: Exception) -> Failure:
    """The error as a value; its traceback goes to the log of the rank."""
    traceback.print_exception(error)
    sys.stderr.flush()
    return Failure(type(error).__qualname__, str(error), to_json(error) if isinstance(error, HybridFlowError) else None)


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
