"""What runs inside an actor: it sets the process up as one rank, holds the worker and calls its methods."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import inspect
import os
import random
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.dispatch import WorkerContext
from hybridflow.errors import HybridFlowError, StorageError, to_json
from hybridflow.process.children import die_with_parent, print_whole_lines, use_threads_of_environment
from hybridflow.single_controller.pieces import Header, Request

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


@dataclass(frozen=True)
class Failure:
    """An exception of a worker, as a value: it reaches the driver even where the exception itself cannot be pickled."""

    kind: str
    message: str
    ours: str | None  # one of our own errors as `errors.to_json` describes it


@dataclass(frozen=True)
class HostInfo:
    """Which process a rank is, a port that was free on its node, and the interface of the node's address (empty: not
    found, or set by the user)."""

    pid: int
    free_port: int
    interface: str


@dataclass(frozen=True)
class Identity:
    """What a driver that joins a detached group needs to know of a rank."""

    role: str
    world_size: int
    node: str
    log_path: Path
    pid: int


class Host:
    """One rank. The controller calls `describe`, `set_up` and `construct` in this order, then `call` any number of
    times."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._log: Any = None
        self._identity: Identity | None = None

    def describe(self, address: str, ports: range) -> HostInfo:
        """Process id, a free TCP port at `address`, and its interface."""
        interface = "" if os.environ.get("GLOO_SOCKET_IFNAME") else interface_of(address)
        return HostInfo(os.getpid(), free_port(address, ports), interface)

    def identity(self) -> Identity | None:
        """What `set_up` was given; None before it."""
        return self._identity

    def set_up(self, role: str, context: WorkerContext, env: Mapping[str, str], path: Sequence[str]) -> None:
        """Set environment, import path, log file and crash reports. It comes before the worker class is unpickled,
        which may import torch."""
        die_with_parent()  # the parent is the raylet, which a worker stuck in a collective would outlive
        log_path = context.log_path
        self._identity = Identity(role, context.world_size, context.node, log_path, os.getpid())
        os.environ.update(env)
        use_threads_of_environment()
        # Ray itself passes nothing on (`plain_job_config`)
        sys.path += [entry for entry in path if entry not in sys.path]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115  stays open as long as the process
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        print_whole_lines()
        faulthandler.enable(self._log, all_threads=True)
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)  # how the driver asks where a rank hangs

    def construct(self, worker_class: type, context: WorkerContext, args: Sequence[Any]) -> Failure | None:
        """Build the worker."""
        try:
            self._worker = worker_class(context, *args)
        except Exception as error:
            return failure(error)
        return None

    def call(self, request: Request, *objects: Any) -> Any:
        """Run a method; a coroutine is awaited. An error comes back as a `Failure`."""
        try:
            args, kwargs = request.arguments(objects)
            result = getattr(self._worker, request.method)(*args, **kwargs)
            return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except Exception as error:
            return failure(error)

    def call_stored(self, together: Sequence[Sequence[str]], inline_bytes: int, request: Request, *objects: Any) -> Any:
        """`call` for a method that returns a batch: a `Header` and then a batch, and so an object, for each group of
        columns.

        Args:
            together: the groups. Without any (a rank whose result is not collected) the result is dropped.
            inline_bytes: size up to which the header contains a column.
            request, objects: as for `call`.
        """
        result = self.call(request, *objects)
        if not together:
            return result if isinstance(result, Failure) else None
        if not isinstance(result, DataProto):
            return (result, *(None for _ in together))
        if sorted(result.columns) != sorted(name for names in together for name in names):
            return (result, *(None for _ in together))  # the driver says what is wrong with it
        columns = DataProto(dict(result.items()), {}, result.bfloat16)  # the header has the meta
        return (Header.of(result, inline_bytes), *(columns.select(names) for names in together))


async def _awaited(value: Any) -> Any:
    return await value


def failure(error: Exception) -> Failure:
    """The error as a value; its traceback goes to the rank's log."""
    with suppress(OSError):  # the log's own disk may be full
        traceback.print_exception(error)
        sys.stderr.flush()
    storage = StorageError.of(error) if isinstance(error, OSError) else None
    ours = error if isinstance(error, HybridFlowError) else storage
    return Failure(type(error).__qualname__, str(error), to_json(ours) if ours else None)


def free_port(address: str, ports: range) -> int:
    """One of the TCP `ports` that is free at `address` now."""
    for port in random.SystemRandom().sample(ports, min(len(ports), 200)):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue  # taken: try another
            return port
    raise OSError(f"no free port between {ports.start} and {ports.stop} on {address}")


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; empty where none has."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
