"""The actor that runs in each worker process, for one worker class or for several roles that share
the process (`colocated`).

It initialises the process as one rank, owns the worker and calls its methods.
"""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from hybridflow.batch import DataProto
from hybridflow.dispatch import MethodSpec, WorkerContext, method_spec
from hybridflow.errors import HybridFlowError, StorageError, to_json
from hybridflow.observe import spans
from hybridflow.process.children import (
    die_with_parent,
    print_whole_lines,
    use_threads_of_environment,
)
from hybridflow.single_controller.stored import Header, Request

_WORTH_A_SPAN_S = 0.001
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


class Colocated:
    """A worker that contains one worker per role, in the order of `roles`. Use `colocated` to
    create a subclass.
    """

    roles: ClassVar[Mapping[str, type]] = {}

    def __init__(self, context: WorkerContext, *arguments: Sequence[Any]) -> None:
        """Construct each role as `role(context, *arguments[i])`. Later roles find earlier ones in
        `context.neighbours`."""
        self._workers: dict[str, Any] = {}
        inside = replace(context, neighbours=self._workers)
        for (name, role), args in zip(self.roles.items(), arguments, strict=True):
            self._workers[name] = role(inside, *args)

    def __getattr__(self, address: str) -> Any:
        """Look up `ROLE.METHOD`, the format returned by `address_of`."""
        role, _, method = address.partition(".")
        try:
            return getattr(self.__dict__["_workers"][role], method)
        except KeyError:
            raise AttributeError(
                f"the role of {address!r} must be one of {', '.join(self.roles)}"
            ) from None


def colocated(**roles: type) -> type:
    """Create a worker class whose processes contain one worker of each role.

    The group's `args` is a tuple of arguments per role.

    Methods are called as usual: `group.run(Actor.update, ...)`. If several roles have the method,
    select one with `role`: `group.run(Model.save, ..., role="critic")`. `mesh_position` is taken
    from the first role that defines it.
    """
    made: dict[str, Any] = {"roles": roles}
    placed = [name for name, role in roles.items() if hasattr(role, "mesh_position")]
    if placed:  # the group checks the class for this method before calling the workers
        made["mesh_position"] = lambda self: getattr(self, f"{placed[0]}.mesh_position")()
    return type("And".join(role.__name__ for role in roles.values()), (Colocated,), made)


def address_of(worker_class: type, method: Callable[..., Any], role: str | None) -> str:
    """Return the name under which a process of `worker_class` calls `method`.

    It includes the role if the class is colocated.

    Raises:
        TypeError: the class or role has no such method, or several roles have one and `role` is
            None.
    """
    spec: MethodSpec = method_spec(method)
    called = f"{getattr(method, '__qualname__', method)}"
    if not issubclass(worker_class, Colocated):
        if not _owns(worker_class, method, spec):
            raise TypeError(f"{called} is not a method of {worker_class.__name__}")
        return spec.name
    owners = []
    for name, found in worker_class.roles.items():
        if role in (None, name) and _owns(found, method, spec):
            owners.append(name)
    if len(owners) != 1:
        problem = (
            f"belongs to {' and '.join(owners)}: pass role=" if owners else "is not a method of"
        )
        raise TypeError(f"{called} {problem} {role or ', '.join(worker_class.roles)}")
    return f"{owners[0]}.{spec.name}"


def _owns(worker_class: type, method: Callable[..., Any], spec: MethodSpec) -> bool:
    return any(vars(base).get(spec.name) is method for base in inspect.getmro(worker_class))


@dataclass(frozen=True)
class Failure:
    """A worker's exception as a plain value, which can be sent to the driver even if the exception
    itself cannot be pickled.
    """

    kind: str
    message: str
    ours: str | None  # `errors.to_json` of a HybridFlowError; None for other exceptions


@dataclass(frozen=True)
class HostInfo:
    """The rank's process id, a free port on its node, the network interface with the node's
    address, and the id of the machine's boot (`spans.boot_id`). The interface is empty if none was
    found or the user has set one.
    """

    pid: int
    free_port: int
    interface: str
    boot: str


@dataclass(frozen=True)
class Identity:
    """Information about a rank for drivers that join a detached group."""

    role: str
    world_size: int
    node: str
    log_path: Path
    pid: int


class Host:
    """One rank.

    The controller calls `describe`, `set_up` and `construct` in this order, then `call` any number
    of times.
    """

    def __init__(self) -> None:
        self._worker: Any = None
        self._log: Any = None
        self._identity: Identity | None = None

    def describe(self, address: str, ports: range) -> HostInfo:
        """Return this process's `HostInfo`, with a TCP port that is free at `address`."""
        interface = "" if os.environ.get("GLOO_SOCKET_IFNAME") else interface_of(address)
        return HostInfo(os.getpid(), free_port(address, ports), interface, spans.boot_id())

    def clock(self) -> float:
        """Return the Unix time of this machine."""
        return spans.unix_time()

    def identity(self) -> Identity | None:
        """Return the rank's identity; None before `set_up`."""
        return self._identity

    def set_up(
        self, role: str, context: WorkerContext, env: Mapping[str, str], path: Sequence[str]
    ) -> None:
        """Set up the environment, import path, log file and crash reports.

        Must run before the worker class is unpickled, which may import torch.
        """
        # otherwise a worker stuck in a collective would outlive its parent, the raylet
        die_with_parent()
        log_path = context.log_path
        self._identity = Identity(role, context.world_size, context.node, log_path, os.getpid())
        os.environ.update(env)
        use_threads_of_environment()
        # Ray itself propagates no import path (`plain_job_config`)
        sys.path += [entry for entry in path if entry not in sys.path]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # stays open for the lifetime of the process
        self._log = open(log_path, "ab", buffering=0)  # noqa: SIM115
        os.dup2(self._log.fileno(), 1)
        os.dup2(self._log.fileno(), 2)
        print_whole_lines()
        spans.record_to(log_path.with_suffix(spans.SUFFIX), f"{role} rank {context.rank}")
        faulthandler.enable(self._log, all_threads=True)
        # used to find where a rank hangs
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)

    def construct(
        self, worker_class: type, context: WorkerContext, args: Sequence[Any]
    ) -> Failure | None:
        """Construct the worker. Returns a `Failure` if the constructor raised."""
        try:
            self._worker = worker_class(context, *args)
        except Exception as error:
            return failure(error)
        return None

    def call(self, packed: Request | bytes, *objects: Any) -> Any:
        """Call a method and return its result; coroutines are awaited. An exception is returned as
        a `Failure`."""
        request = Request.unpacked(packed)
        try:
            with spans.span("read arguments", least_s=_WORTH_A_SPAN_S):
                args, kwargs = request.arguments(objects)
            with spans.span(request.method):
                result = getattr(self._worker, request.method)(*args, **kwargs)
                return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
        except Exception as error:
            return failure(error)

    def call_stored(self, packed: Request | bytes, *objects: Any) -> Any:
        """Same as `call`, for a method that returns a batch.

        Returns a `Header`, followed by one batch for each group of columns in `Request.together`,
        so that each group becomes an object in the store. Without groups, the rank's result is
        discarded.
        """
        request = Request.unpacked(packed)
        together = request.together
        result = self.call(request, *objects)
        if not together:
            return result if isinstance(result, Failure) else None
        if not isinstance(result, DataProto):
            return (result, *[None] * len(together))
        if sorted(result.columns) != sorted(chain.from_iterable(together)):
            return (result, *[None] * len(together))  # the driver raises the error
        columns = DataProto(dict(result.items()), {}, result.bfloat16)  # meta is in the header
        return (Header.of(result, request.inline_bytes), *map(columns.select, together))


async def _awaited(value: Any) -> Any:
    return await value


def failure(error: Exception) -> Failure:
    """Convert an exception to a `Failure` and print its traceback to the rank's log."""
    with suppress(OSError):  # the disk of the log may be full
        traceback.print_exception(error)
        sys.stderr.flush()
    storage = StorageError.of(error) if isinstance(error, OSError) else None
    ours = error if isinstance(error, HybridFlowError) else storage
    return Failure(type(error).__qualname__, str(error), to_json(ours) if ours else None)


def free_port(address: str, ports: range) -> int:
    """Return one of the TCP `ports` that is currently free at `address`."""
    for port in random.SystemRandom().sample(ports, min(len(ports), 200)):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue  # already in use
            return port
    raise OSError(f"no free port between {ports.start} and {ports.stop} on {address}")


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address; empty if there is none."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
