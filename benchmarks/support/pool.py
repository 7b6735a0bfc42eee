"""Processes that persist for the duration of an entry, so that sides can run in turn. Every rank
runs every job."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from hybridflow.errors import ResourceError
from hybridflow.process.secret import VARIABLE, job_secret

_PATIENCE_S = 200


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """One forked process per rank. Each has an object `make(rank)`, whose methods are the jobs."""

    def __init__(self, world: int, make: Callable[[int], Any]) -> None:
        os.environ.setdefault(
            VARIABLE, job_secret()
        )  # required by the store at which the ranks meet
        context = multiprocessing.get_context("fork")
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(world):
            end, far = context.Pipe()
            process = context.Process(
                target=_serve, args=(far, make, rank), daemon=True
            )
            process.start()
            far.close()  # so that waiting for a rank ends when the rank dies
            self.ends.append(end)
            self.processes.append(process)
        self._answers()

    def run(self, method: str, *values: Any) -> list[Any]:
        """Run a method on every rank and return the results.

        Raises:
            ResourceError: a rank failed or did not reply in time. All ranks are then killed.
        """
        for end in self.ends:
            end.send((method, values))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _PATIENCE_S
        while missing := [
            rank for rank in range(len(self.ends)) if rank not in answers
        ]:
            timeout = max(deadline - time.monotonic(), 0)
            ready = wait([self.ends[rank] for rank in missing], timeout)
            if not ready:
                self.stop()
                raise ResourceError(
                    f"ranks {missing} did not reply within {_PATIENCE_S} s"
                )
            for rank in missing:
                if self.ends[rank] in ready:
                    answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(self.ends))]

    def _answer(self, rank: int) -> Any:
        try:
            failure, answer = self.ends[rank].recv()
        except EOFError:
            failure = "its process has ended"
            answer = None
        if failure:  # the others may be waiting for this rank
            self.stop()
            raise ResourceError(f"rank {rank}: {failure}")
        return answer

    def stop(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(end: Connection, make: Callable[[int], Any], rank: int) -> None:
    def attempt(call: Callable[..., Any], *values: Any) -> tuple[str, Any]:
        try:
            return "", call(*values)
        except Exception as error:
            return f"{type(error).__name__}: {error}", None

    failure, made = attempt(make, rank)
    end.send((failure, None))
    while True:
        method, values = end.recv()
        end.send(attempt(getattr(made, method), *values))
