"""Supervisor of a job's driver: waits until every node has joined Ray, runs `hybridflow train` or a
user's program, and forwards stop requests.

On SIGUSR1 or SIGTERM, the supervisor sends SIGUSR1 to the driver to request a checkpoint, and
terminates the driver if this takes too long. On SIGUSR2, it terminates the driver immediately. The
driver runs in a separate session, because Slurm may signal a step's entire process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.errors import ResourceError, RunStopped
from hybridflow.launch import records
from hybridflow.launch.node import clean_environment
from hybridflow.launch.verdict import STOPPED
from hybridflow.single_controller.cluster import wait_for_nodes

# first word of a job whose driver is a user's program, followed by the arguments for Python
PROGRAM = "program"
# where `hybridflow.Run(where="slurm")` of that program finds the job's Ray
ADDRESS = "HYBRIDFLOW_JOB_ADDRESS"
_END_S = 20.0  # the driver takes a few seconds to end its workers
_POLL_S = 0.2


class Driver:
    """The driver process: a `hybridflow` command or a user's program. Its output is copied to a log
    and to this process's stdout.
    """

    def __init__(self, folder: Path, grace_s: float) -> None:
        """`grace_s`: maximum time for a requested checkpoint, in seconds."""
        self.folder = folder
        self.grace_s = grace_s
        self.process: subprocess.Popen[bytes] | None = None
        self.asked_at: float | None = None
        self.ended_at: float | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.ask())
        signal.signal(signal.SIGUSR2, lambda number, frame: self.end())

    def ask(self) -> None:
        """Request that the driver write a checkpoint and stop."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            self._send(signal.SIGUSR1)

    def end(self) -> None:
        """Stop the driver immediately, as with Ctrl-C."""
        if self.ended_at is None:
            self.ended_at = time.monotonic()
            self._send(signal.SIGTERM)

    def check(self) -> None:
        """Raise ResourceError if Ray has exited on a node, or RunStopped if the job was asked to
        stop. Called before the driver starts.
        """
        if failed := records.failures(self.folder):
            raise ResourceError(f"{failed[0]['node']}: {failed[0]['what']}")
        if self.asked_at is not None or self.ended_at is not None:
            raise RunStopped("stopped on request before the driver had started")

    def run(self, words: Sequence[str], address: str) -> int:
        """Run the driver (see `command`) until it exits. `address` is the address of the Ray head.
        Returns the driver's exit status, or STOPPED if a stop was requested.
        """
        with (self.folder / records.DRIVER_LOG).open("ab") as log:
            self.process = subprocess.Popen(
                command(words, address),
                env=clean_environment(os.environ) | {"PYTHONUNBUFFERED": "1", ADDRESS: address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self.asked_at is not None:  # a request between the last check and the start
            self._send(signal.SIGUSR1)
        with (self.folder / records.DRIVER_LOG).open("rb") as shown:
            while self.process.poll() is None:
                self._escalate()
                self._show(shown.read())
                time.sleep(_POLL_S)
            self._show(shown.read())
        status = self.process.returncode
        if status and self.asked_at is not None:
            return STOPPED
        return status if status >= 0 else 128 - status

    def _escalate(self) -> None:
        """Escalate once a deadline has passed: from a stop request to SIGTERM, and from SIGTERM to
        SIGKILL. Also terminate the driver if the job has been restarted elsewhere.
        """
        now = time.monotonic()
        # Slurm has lost this node and started the job on others
        if records.has_later_start(self.folder):
            self.end()
        if self.asked_at is not None and now > self.asked_at + self.grace_s:
            self.end()
        if self.ended_at is not None and now > self.ended_at + _END_S:
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    @staticmethod
    def _show(text: bytes) -> None:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()


def command(words: Sequence[str], address: str) -> list[str]:
    """Return the driver's command: `hybridflow WORDS` with the address of the Ray head, or, if the
    first word is `PROGRAM`, Python with the remaining words. Such a program is started as if from a
    shell, so that it can import modules from its own folder.
    """
    if words[0] == PROGRAM:
        return [sys.executable, *words[1:]]
    address_word = f"cluster.address={address}"
    return [sys.executable, "-P", "-m", "hybridflow.cli.main", *words, address_word]


def run(
    folder: Path, nodes: int, words: Sequence[str], start_timeout_s: float, grace_s: float
) -> int:
    """Wait for the cluster, then run the driver in it.

    Args:
        folder: the `restart-N` folder of this attempt to run the job.
        nodes: number of nodes that must join.
        words: see `command`.
        start_timeout_s: time within which the nodes must join, in seconds.
        grace_s: maximum time for a requested checkpoint, in seconds.
    """
    driver = Driver(folder, grace_s)
    deadline = time.monotonic() + start_timeout_s
    while (head := records.read(folder / records.HEAD)) is None:
        driver.check()
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the head node did not start Ray within {start_timeout_s:.0f} s; see its log"
            )
        time.sleep(_POLL_S)
    address = str(head["address"])
    wait_for_nodes(address, nodes, deadline - time.monotonic(), driver.check)
    return driver.run(words, address)
