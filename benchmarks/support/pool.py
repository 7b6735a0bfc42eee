"""Processes that stay up over a whole benchmark, so that sides can be interleaved: the driver names a job, every rank does it."""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_PATIENCE_S = 300


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """One process a rank, each with a `module:class` made as `cls(rank, **arguments)`; its methods are the jobs."""

    def __init__(self, world: int, target: str, /, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends, self.processes = [], []
        for rank in range(world):
            end, far = context.Pipe()
            process = context.Process(target=_serve, args=(far, target, rank, arguments), daemon=True)
            process.start()
            self.ends.append(end)
            self.processes.append(process)
        self._answers()

    def run(self, method: str, *values: Any) -> list[Any]:
        """Every rank's answer."""
        for end in self.ends:
            end.send((method, values))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers, deadline = [], time.monotonic() + _PATIENCE_S
        for rank, end in enumerate(self.ends):
            if not end.poll(max(deadline - time.monotonic(), 0)):
                self.stop()
                raise TimeoutError(f"rank {rank} did not answer within {_PATIENCE_S} s")
            answers.append(end.recv())
        if failed := [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, Exception)]:
            self.stop()
            raise RuntimeError("; ".join(failed))
        return answers

    def stop(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(end: Connection, target: str, rank: int, arguments: dict[str, Any]) -> None:
    module, name = target.split(":")
    made: Any = None
    job: tuple[str, Sequence[Any]] = ("", ())
    while True:
        try:
            if made is None:
                made = getattr(importlib.import_module(module), name)(rank, **arguments)
                answer = None
            else:
                answer = getattr(made, job[0])(*job[1])
        except Exception as error:
            answer = error
        end.send(answer)
        job = end.recv()
