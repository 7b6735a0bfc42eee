"""The typed errors that cross rooms.

Every error a user can cause derives from `HybridFlowError` and says what is wrong, where (key,
file, rank), and what to do. The command line prints the message alone and exits with `exit_code`; a
traceback is only shown for bugs of ours.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class HybridFlowError(Exception):
    """Base of all errors that are reported to a user as one clear message."""

    exit_code = 1


class ConfigError(HybridFlowError):
    """A key, value or combination in the configuration is wrong. Names the key and the nearest
    valid one."""

    exit_code = 2


class DataError(HybridFlowError):
    """A dataset file, column or row is missing or malformed. Names the file and the column or
    row."""

    exit_code = 2


class SchemaError(DataError):
    """Columns of a batch are missing, of unequal length, duplicated with other values, or of a
    wrong type."""


class ModelError(HybridFlowError):
    """A model cannot be built or sharded as configured: unknown family, sizes that do not divide,
    missing weights."""

    exit_code = 2


class ResourceError(HybridFlowError):
    """The cluster lacks what was asked for. Says what is free on which node."""


class ClusterLostError(ResourceError):
    """Ray itself was lost, and all processes of the run with it. Says what of it, and how the run
    goes on."""


class MemoryExhaustedError(ResourceError):
    """A device or the machine ran out of memory. Says in which phase, how much was in use, and
    which keys lower it."""


class StorageError(HybridFlowError):
    """A file cannot be written or read: the disk is full, the file system is read-only, or rights
    are missing."""

    @classmethod
    def of(cls, error: OSError, where: str = "") -> StorageError | None:
        """The error in words, with what to do; None when it is not about storage. `where` replaces
        the file's name."""
        number = error.errno or 0
        remedy = _REMEDIES.get(number)
        return (
            cls(f"{where or error.filename or 'a file'}: {os.strerror(number)}; {remedy}")
            if remedy
            else None
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError without a file the name of this one: the system names a file when it opens
    it, and not when it writes to it or closes it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


_MAKE_WRITABLE = "make it writable, or choose another place"
_MAKE_ROOM = "make room, or choose another place"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: _MAKE_ROOM,
    errno.EROFS: _MAKE_WRITABLE,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.ENOTDIR: "a part of the path is a file; choose another place",
    errno.EISDIR: "it is a folder; choose another name",
    errno.EEXIST: "a file is there; remove it, or choose another place",
    errno.EIO: "the device fails; choose another place",
}


class WorkerError(HybridFlowError):
    """A worker died, hung or raised.

    Args:
        message: what happened.
        role, rank, node, method: which worker and what it was doing.
        waited_s: seconds waited before giving up, or None when the failure came at once.
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
    """A rollout engine failed to start, died, timed out or refused a request. Carries the tail of
    its log, and in the process that asked the answers as far as they had come (`begun`: a
    `Completion` for each prompt)."""

    def __init__(self, message: str, *, engine: str = "", log_tail: str = "") -> None:
        self.engine = engine
        self.log_tail = log_tail
        self.begun: tuple[Any, ...] = ()
        prefix = f"engine {engine}: " if engine else ""
        tail = f"\n--- last lines of its log ---\n{log_tail.rstrip()}" if log_tail else ""
        super().__init__(f"{prefix}{message}{tail}")


class EngineSilent(EngineError):
    """The engine could not be reached, or did not answer by the deadline: nobody knows what it is
    doing."""


class EnginesLostError(EngineError):
    """No engine can answer: all have died or have no current weights. Gives the reason for each."""


class WeightSyncError(HybridFlowError):
    """Weights could not be sent to an engine, or what arrived is not what was sent."""


class FlowError(HybridFlowError):
    """A flow calls its run in a way that has no meaning, or its own code has failed.

    Args:
        line: of the flow's file, where it is not the one that was executed.
    """

    def __init__(self, message: str, *, line: int | None = None) -> None:
        self.line = line
        super().__init__(message)


class LogprobMismatchError(HybridFlowError):
    """Rollout and trainer disagree on the log-probabilities of the same tokens beyond the
    configured bound."""


class RouterReplayError(HybridFlowError):
    """Router replay failed: a router did not use the experts it was given, or the routes do not fit
    the batch or the model."""


class NonFiniteError(HybridFlowError):
    """A loss or gradient is NaN or infinite. Says on which rank and in which micro-batch; the
    weights are unchanged."""


class CheckpointError(HybridFlowError):
    """A checkpoint cannot be written or read. The previous one is still whole."""


class RunInterrupted(HybridFlowError):
    """The user stopped the run. Says how to resume it."""

    exit_code = 130


class RunStopped(HybridFlowError):
    """The run was asked to stop (SIGUSR1) and did so after a checkpoint. `hybridflow slurm`
    requeues such a job."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on later


def to_json(error: HybridFlowError) -> str:
    """The error as JSON (type, message, attributes), which crosses processes without a pickle.
    `from_json` reads it."""
    state = {
        key: value
        for key, value in error.__dict__.items()
        if isinstance(value, str | int | float | bool | None)
    }
    return json.dumps({"type": type(error).__qualname__, "message": str(error), "state": state})


def from_json(text: str, note: str = "") -> HybridFlowError:
    """The error that `to_json` described, with `note` added to its message. A type that this
    process does not know becomes the base type."""
    described: dict[str, Any] = json.loads(text)
    kind = next(
        (kind for kind in _kinds(HybridFlowError) if kind.__qualname__ == described["type"]),
        HybridFlowError,
    )
    error = kind.__new__(kind)  # not its constructor, which would compose the message a second time
    error.__dict__.update(described["state"])
    error.args = (f"{described['message']} {note}".rstrip(),)
    return error


def _kinds(kind: type[HybridFlowError]) -> list[type[HybridFlowError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _kinds(child))]
