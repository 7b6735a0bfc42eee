"""Megatron's checkpoint writer, inside the rank's own process.

filesystem_async.py:266 forks two writers for each rank (out of a process that runs gloo's threads) and filesystem_async.py:55 starts
a manager process of 270 MB beside it, which outlives a killed rank. A synchronous save needs neither.
"""

from __future__ import annotations

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)


def install() -> None:
    """Replace the forking writer. Idempotent."""
    if not isinstance(filesystem_async._results_queue, queue.SimpleQueue):
        filesystem_async._results_queue = queue.SimpleQueue()
        FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)


def _write_here(transform_list: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results: Any) -> None:
    """Write this rank's files one after another; put {bucket: written items}, or the first error, where Megatron collects it."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(write_buckets):
        local: queue.Queue[Any] = queue.Queue()
        done: queue.Queue[int] = queue.Queue()
        done.put(index)
        FileSystemWriterAsync.write_preloaded_data(
            transform_list,
            local_proc_idx=index,
            write_bucket=bucket,
            results_queue=local,
            count_queue=done,
            use_fsync=True,
            use_msc=use_msc,
        )
        _, outcome = local.get()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)
