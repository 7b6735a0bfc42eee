"""`RewardPool`: the driver's interface to the processes that score rows."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hybridflow.config.registry import absolute_entry, is_offered
from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.observe import spans
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.rewards.functions import Outcome, Row
from hybridflow.rewards.lines import Forked, fork_process, start_process

_START_S = 300.0  # for the import of the user's file
_PATIENCE_S = 60.0  # beyond a call's deadline, for the host to report it
_MAX_PROCESSES = 16
_COUNTER = "reward calls"  # in the timeline
_MAX_HOST_RESTARTS = 3


class RewardPool:
    """Starts the host (`rewards.host`) in the background; `start` waits for it.

    Calls run as soon as they are submitted. If the host dies, it is restarted and unanswered calls
    are resubmitted. Not thread-safe; only one task at a time may collect.

    Args:
        config: the `reward` section.
        log_path: log file of the host and the functions; None uses the output of this process.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self.config = config
        self.log_path = log_path
        self._restarts = RestartLimit(_MAX_HOST_RESTARTS)
        self._jobs: dict[int, list[Row]] = {}  # submitted but not answered
        self._outcomes: dict[int, list[Outcome]] = {}
        self._submitted = 0
        self._is_ready = False
        self.sources: list[str] | None = None
        self.by_group = False
        self.facts = set[str]()
        self._launch()

    def _launch(self) -> None:
        combine = {
            absolute_entry(str(name)): weight for name, weight in self.config.combine.items()
        }
        config = replace(
            self.config,
            verifiers=tuple(map(absolute_entry, self.config.verifiers)),
            combine=combine,
        )
        if config.path is not None:
            config = replace(config, path=str(Path(config.path).resolve()))
        self._process: subprocess.Popen[bytes] | Forked
        if self.config.path is not None and is_offered(Path(self.config.path)):
            # not at the top: `python -m` of the host would find its module already imported
            from hybridflow.rewards.host import main

            self._process, self._lines = fork_process(main, self.log_path)
        else:
            self._process, self._lines = start_process("hybridflow.rewards.host", self.log_path)
        self._is_ready = False
        processes = self.config.processes or min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
        self._lines.send({"config": asdict(config), "processes": processes})

    def start(self) -> None:
        """Wait until the function or the verifiers are loaded.

        Raises:
            ConfigError: they cannot be loaded.
        """
        if self._is_ready:
            return
        self._lines.socket.settimeout(_START_S)
        try:
            loaded = self._lines.first()
        except TimeoutError:
            raise ConfigError(f"{self._subject()} did not load within {_START_S:.0f} s") from None
        if loaded is None:
            code = self._process.wait(_PATIENCE_S)
            raise ConfigError(
                f"the process loading {self._subject()} exited with code {code}{self._log_hint()}"
            )
        if "refused" in loaded:
            raise ConfigError(loaded["refused"])
        self.sources, self.by_group = loaded["ready"], loaded["by_group"]
        self.facts = set(loaded["facts"])
        self._is_ready = True

    def submit(self, rows: list[Row]) -> int:
        """Submit a call with these rows and return its number. Raises ValueError for a type that
        JSON cannot represent."""
        self.start()
        self._submitted += 1
        self._jobs[self._submitted] = rows
        spans.count(_COUNTER, len(self._jobs))
        self._send([self._submitted])
        return self._submitted

    async def collect(self, numbers: Sequence[int]) -> list[list[Outcome]]:
        """Wait for these calls and return the outcomes of their rows."""
        while any(number in self._jobs for number in numbers):
            try:
                await _readable(self._lines.socket, self.config.timeout_s + _PATIENCE_S)
                messages = self._lines.received()
            except TimeoutError:
                messages = None
            if messages is None:
                self._relaunch()
                continue
            for message in messages:
                # otherwise the call was discarded
                if self._jobs.pop(message["id"], None) is not None:
                    self._outcomes[message["id"]] = message["outcomes"]
            spans.count(_COUNTER, len(self._jobs))
        return list(map(self._outcomes.pop, numbers))

    def forget(self, numbers: Sequence[int]) -> None:
        """Discard these calls."""
        for number in numbers:
            self._jobs.pop(number, None)
            self._outcomes.pop(number, None)

    def _send(self, numbers: Sequence[int]) -> None:
        self._lines.socket.settimeout(_PATIENCE_S)
        try:
            for number in numbers:
                self._lines.send({"id": number, "rows": self._jobs[number]})
        except OSError:
            self._relaunch()

    def _relaunch(self) -> None:
        """Restart a host that died or stopped responding, and resubmit its unanswered calls."""
        self.close()
        if not self._restarts.take():
            raise HybridFlowError(
                f"the reward process exited {_MAX_HOST_RESTARTS + 1} times within an hour, last "
                f"with code {self._process.returncode}{self._log_hint()}; -9 often means that "
                "the machine ran out of memory"
            )
        self._launch()
        self.start()
        self._send(list(self._jobs))

    def _subject(self) -> str:
        return f"{self.config.path} (reward.path)" if self.config.path else "the verifiers"

    def _log_hint(self) -> str:
        return f"; see {self.log_path}" if self.log_path else ""

    def close(self) -> None:
        """Stop the host and its processes."""
        self._lines.socket.close()
        self._process.kill()  # its processes end with it
        self._process.wait(_PATIENCE_S)

    def __del__(self) -> None:
        if hasattr(self, "_process") and self._process.poll() is None:
            self.close()


async def _readable(connection: socket.socket, timeout_s: float) -> None:
    """Wait until the connection is readable or closed. Raises TimeoutError after `timeout_s`."""
    loop = asyncio.get_running_loop()
    has_data = asyncio.Event()
    loop.add_reader(connection, has_data.set)
    try:
        await asyncio.wait_for(has_data.wait(), timeout_s)
    finally:
        loop.remove_reader(connection)
