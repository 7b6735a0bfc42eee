"""The typed errors shared by all packages.

All errors that a user can cause derive from `HybridFlowError`. Its message states the problem, the
location (key, file, rank) and the remedy. The command line prints only the message and exits with
`exit_code`; a traceback is shown only for bugs in HybridFlow.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the known name closest to `name`, or an empty string if none
    is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class HybridFlowError(Exception):
    """Base of all errors that are reported to the user as a single message."""

    exit_code = 1


class ConfigError(HybridFlowError):
    """A key, value or combination in the configuration is invalid. The message names the key and
    the nearest valid one."""

    exit_code = 2


class DataError(HybridFlowError):
    """A dataset file, column or row is missing or malformed. The message names the file and the
    column or row."""

    exit_code = 2


class SchemaError(DataError):
    """Columns of a batch are missing, differ in length, conflict, or have the wrong type."""


class ModelError(HybridFlowError):
    """A model cannot be built or sharded as configured: unknown family, sizes that do not divide,
    missing weights."""

    exit_code = 2


class ResourceError(HybridFlowError):
    """The cluster lacks the requested resources. The message lists the free resources of each
    node."""


class ClusterLostError(ResourceError):
    """Ray itself failed, and with it all processes of the run. The message states which part failed
    and how to continue."""


class MemoryExhaustedError(ResourceError):
    """A device or the machine ran out of memory. The message states the phase, the memory in use,
    and the keys that reduce memory use."""


class StorageError(HybridFlowError):
    """A file cannot be written or read: the disk is full, the file system is read-only, or
    permissions are missing."""

    @classmethod
    def of(cls, error: OSError, where: str = "") -> StorageError | None:
        """Convert an OSError to an error with a remedy; returns None if it does not concern
        storage. `where` is used in place of the file name."""
        number = error.errno or 0
        remedy = _REMEDIES.get(number)
        return (
            cls(f"{where or error.filename or 'a file'}: {os.strerror(number)}; {remedy}")
            if remedy
            else None
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Return a context manager that adds this file name to OSErrors without one. The system reports
    the name when opening fails, but not when writing or closing fails."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


_MAKE_WRITABLE = "make it writable, or choose another path"
_MAKE_ROOM = "free space, or choose another path"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: "your quota there is used up; free space, or choose another path",
    errno.EFBIG: _MAKE_ROOM,
    errno.EROFS: _MAKE_WRITABLE,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.ENOTDIR: "part of the path is a file; choose another path",
    errno.EISDIR: "it is a folder; choose another name",
    errno.EEXIST: "a file already exists there; remove it, or choose another path",
    errno.EIO: "the device is failing; choose another path",
    errno.ESTALE: (
        "another machine has replaced the file, or the file server has restarted; run the same "
        "command again"
    ),
    errno.EMFILE: "this process may not open more files; raise the limit with ulimit -n",
    errno.ENFILE: "this machine may not open more files; raise fs.file-max with sysctl",
}


class WorkerError(HybridFlowError):
    """A worker died, hung or raised an exception.

    Args:
        message: description of the failure.
        role, rank, node, method: identity of the worker, and the method that it was running.
        waited_s: seconds waited before giving up, or None if the failure was immediate.
        log_tail: the last lines of the worker's log.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        rank: int = -1,
        node: str = "",
        method: str = "",
        waited_s: float | None = None,
        log_tail: str = "",
    ) -> None:
        self.role = role
        self.rank = rank
        self.node = node
        self.method = method
        self.waited_s = waited_s
        self.log_tail = log_tail
        where = (
            f"{role or 'worker'} rank {rank} on {node or 'unknown node'}, in {method or 'start-up'}"
        )
        waited = f" after {waited_s:.0f} s" if waited_s is not None else ""
        tail = f"\n--- last lines of its log ---\n{log_tail.rstrip()}" if log_tail else ""
        super().__init__(f"{message} ({where}{waited}){tail}")


class EngineError(HybridFlowError):
    """A rollout engine failed to start, died, timed out or rejected a request. Contains the tail of
    the engine's log and, in the requesting process, the partial responses (`begun`: a `Completion`
    per prompt)."""

    def __init__(self, message: str, *, engine: str = "", log_tail: str = "") -> None:
        self.engine = engine
        self.log_tail = log_tail
        self.begun: tuple[Any, ...] = ()
        prefix = f"engine {engine}: " if engine else ""
        tail = f"\n--- last lines of its log ---\n{log_tail.rstrip()}" if log_tail else ""
        super().__init__(f"{prefix}{message}{tail}")


class EngineSilent(EngineError):
    """The engine could not be reached, or did not respond by the deadline, so its state is
    unknown.
    """


class EnginesLostError(EngineError):
    """No engine can serve requests: all have died or lack current weights. The message states the
    reason for each engine."""


class WeightSyncError(HybridFlowError):
    """Weights could not be sent to an engine, or the data received differs from the data sent."""


class FlowError(HybridFlowError):
    """A flow uses its run incorrectly, or the flow's own code failed.

    Args:
        line: line of the flow's file to report, if it is not the one being executed.
    """

    def __init__(self, message: str, *, line: int | None = None) -> None:
        self.line = line
        super().__init__(message)


class LogprobMismatchError(HybridFlowError):
    """The log-probabilities of the same tokens differ between rollout and trainer by more than the
    configured bound."""


class RouterReplayError(HybridFlowError):
    """Router replay failed: a router did not use the experts passed to it, or the routes do not
    match the batch or the model."""


class NonFiniteError(HybridFlowError):
    """A loss or gradient is NaN or infinite. The message names the rank and micro-batch; the
    weights are unchanged."""


class CheckpointError(HybridFlowError):
    """A checkpoint cannot be written or read. The previous one is still intact."""


class RunInterrupted(HybridFlowError):
    """The user stopped the run. The message explains how to resume it."""

    exit_code = 130


class RunStopped(HybridFlowError):
    """The run received a stop signal (SIGUSR1) and stopped after writing a checkpoint. `hybridflow
    slurm` requeues such a job."""

    exit_code = 75  # EX_TEMPFAIL in sysexits.h: repeating the command continues the run


def to_json(error: HybridFlowError) -> str:
    """Serialize the error as JSON (type, message, attributes), so that it can be passed between
    processes without pickle. `from_json` restores it."""
    state = {
        key: value
        for key, value in error.__dict__.items()
        if isinstance(value, str | int | float | bool | None)
    }
    return json.dumps({"type": type(error).__qualname__, "message": str(error), "state": state})


def from_json(text: str, note: str = "") -> HybridFlowError:
    """Restore an error serialized by `to_json`, with `note` appended to its message. A type that is
    unknown in this process is replaced with the base type."""
    described: dict[str, Any] = json.loads(text)
    kind = next(
        (kind for kind in _kinds(HybridFlowError) if kind.__qualname__ == described["type"]),
        HybridFlowError,
    )
    error = kind.__new__(kind)  # the constructor would compose the message a second time
    error.__dict__.update(described["state"])
    error.args = (f"{described['message']} {note}".rstrip(),)
    return error


def _kinds(kind: type[HybridFlowError]) -> list[type[HybridFlowError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _kinds(child))]
