"""Errors cross processes as JSON, not as pickles."""

from __future__ import annotations

import errno

from hybridflow.errors import (
    DataError,
    EngineError,
    HybridFlowError,
    StorageError,
    WorkerError,
    from_json,
    to_json,
)


def test_an_error_keeps_type_message_and_attributes() -> None:
    error = EngineError("did not start", engine="engine-1", log_tail="line 1\nline 2")
    back = from_json(to_json(error), "(rollout rank 1)")
    assert type(back) is EngineError
    assert back.engine == "engine-1" and back.log_tail == "line 1\nline 2"
    assert str(back) == f"{error} (rollout rank 1)"


def test_a_composed_message_is_not_composed_again() -> None:
    error = WorkerError("hung", role="actor", rank=3, node="n1", method="update", waited_s=5.0)
    back = from_json(to_json(error))
    assert isinstance(back, WorkerError) and (back.rank, back.waited_s) == (3, 5.0)
    assert str(back) == str(error)


def test_types_that_only_the_sender_knows_become_the_base_type() -> None:
    text = to_json(DataError("bad row")).replace("DataError", "SomethingElse")
    back = from_json(text)
    assert type(back) is HybridFlowError and str(back) == "bad row"


def test_errors_of_storage_name_the_file_and_the_remedy() -> None:
    full = StorageError.of(OSError(errno.ENOSPC, "No space left on device", "/runs/metrics.jsonl"))
    assert (
        str(full)
        == "/runs/metrics.jsonl: No space left on device; free space, or choose another path"
    )
    assert "make it writable" in str(
        StorageError.of(OSError(errno.EROFS, "Read-only file system", "/runs"))
    )
    quota = StorageError.of(OSError(errno.EDQUOT, "Disk quota exceeded", "/quota/runs"))
    assert "your quota there is used up" in str(quota)
    stale = StorageError.of(OSError(errno.ESTALE, "Stale file handle", "/runs/dump.parquet"))
    assert str(stale).startswith("/runs/dump.parquet: Stale file handle; another machine has")
    assert "ulimit -n" in str(StorageError.of(OSError(errno.EMFILE, "Too many open files")))
    assert StorageError.of(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) is None
