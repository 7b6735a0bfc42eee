"""Processes that stay up over a whole benchmark, so that sides can be interleaved: the driver names a job, every rank
does it."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from hybridflow.process.secret import VARIABLE, job_secret

_PATIENCE_S = 200


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """One process a rank, each with a `module:class` made as `cls(rank, **arguments)`; its methods are the jobs."""

    def __init__(self, world: int, target: str, /, **arguments: Any) -> None:
        os.environ.setdefault(VARIABLE, job_secret())  # ranks meet in a store that asks for it
        # ranks are forks of one process that has torch loaded: eight imports of it take minutes on a busy machine
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self.ends, self.processes = [], []
        for rank in range(world):
            end, far = context.Pipe()
            process = context.Process(target=_serve, args=(far, target, rank, arguments), daemon=True)
            process.start()
            far.close()  # so that a rank's death ends the wait for it
            self.ends.append(end)
            self.processes.append(process)
        self._answers()

    def run(self, method: str, *values: Any) -> list[Any]:
        """Every rank's answer."""
        for end in self.ends:
            end.send((method, values))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _PATIENCE_S
        while len(answers) < len(self.ends):
            waiting = {end: rank for rank, end in enumerate(self.ends) if rank not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {_PATIENCE_S} s")
            for end in ready:
                answers[waiting[end]] = answer = _received(end)
                if isinstance(answer, Exception):  # the others may wait for this rank
                    self.stop()
                    raise RuntimeError(f"rank {waiting[end]}: {answer}")
        return [answers[rank] for rank in range(len(self.ends))]

    def stop(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
            process.join()


def _received(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return RuntimeError("its process has ended")


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
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        faulthandler.cancel_dump_traceback_later()
        end.send(answer)
        job = end.recv()
        faulthandler.dump_traceback_later(_PATIENCE_S - 10)  # a rank that hangs says where
