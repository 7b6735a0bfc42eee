"""Environments that run in separate processes. Each process hosts many episodes and receives their
requests in batches.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hybridflow.agents.environments.base import Step
from hybridflow.config.registry import absolute_entry
from hybridflow.config.schema import AgentConfig
from hybridflow.errors import HybridFlowError
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.rewards.lines import start_process

_MAX_PROCESSES = 16
_MAX_RESTARTS = 16
_START_S = 300.0  # for the import of the user's file
_END_S = 10.0  # for a killed process to exit


class EpisodeError(HybridFlowError):
    """Raised if an environment raises an error, returns an invalid step or times out, or if its
    process exits. The episode is lost."""


class Episodes:
    """Runs the environments of `rollout.agent.environment`. All calls must come from the same event
    loop.

    If a process exits, its episodes are lost; later episodes are sent to another process.

    Args:
        config: `rollout.agent`.
        log_path: log file for the environments' output; None uses the output of this process.
    """

    def __init__(self, config: AgentConfig, log_path: Path | None = None) -> None:
        self.config = config
        self.log_path = log_path
        self.most = config.environment_processes or min(
            len(os.sched_getaffinity(0)), _MAX_PROCESSES
        )
        self._restarts = RestartLimit(_MAX_RESTARTS)
        self._processes: list[_Process] = []
        self._begun = self._lost = 0
        self._given_up = ""  # why no more episodes can start
        weakref.finalize(self, _end_all, self._processes)

    @property
    def waiting(self) -> bool:
        """True if an environment is processing a request."""
        return any(one.waiting for one in self._processes)

    def begin(self, row: Mapping[str, Any]) -> Episode:
        """Create an episode for this prompt row. Enter it with `async with`.

        Raises:
            EpisodeError: too many environment processes have exited within an hour.
        """
        for process in [one for one in self._processes if one.ended]:
            self._processes.remove(process)
            self._lost += 1
            if not self._restarts.take():
                self._given_up = (
                    f"{self._lost} processes of "
                    f"rollout.agent.environment={self.config.environment} have exited; the last "
                    f"one {process.ended}"
                )
        if self._given_up:
            raise EpisodeError(self._given_up)
        if len(self._processes) < self.most and all(one.episodes for one in self._processes):
            self._processes.append(_Process(self.config, self.log_path))
        process = min(self._processes, key=lambda one: one.episodes)
        self._begun += 1
        return Episode(process, self._begun, row)


@dataclass
class Episode:
    """One episode. Entering its context calls the environment's `reset`, and each answer calls
    `step`.
    """

    process: _Process
    number: int
    row: Mapping[str, Any]

    async def __aenter__(self) -> Self:
        self.process.episodes += 1
        try:
            await self.process.ask({"episode": self.number, "row": dict(self.row)})
        except BaseException:
            self._leave()
            raise
        return self

    async def step(self, answer: str) -> Step:
        """Send an answer to the environment and return the resulting step.

        Raises:
            EpisodeError: the environment raised an error, did not return a `Step` or did not
                respond within `rollout.agent.tool_timeout_s`, or its process exited.
        """
        observation, reward, done = await self.process.ask(
            {"episode": self.number, "answer": answer}
        )
        return Step(observation, reward, done)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self.process.episodes -= 1
        self.process.tell({"episode": self.number, "end": True})


class _Process:
    """A process that hosts environments (`agents.episode_host`), and its pending requests.

    Attributes:
        episodes: number of episodes that it is hosting.
        ended: why the process no longer accepts requests; empty until then.
        waiting: futures of the pending answers, keyed by request number.
    """

    def __init__(self, config: AgentConfig, log_path: Path | None) -> None:
        self.config = config
        self.episodes = 0
        self.ended = ""
        self._asked = 0
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self._moved = time.monotonic()
        self._limit_s = _START_S
        self._has_started = False
        self._timer: asyncio.TimerHandle | None = None
        self._popen, self._lines = start_process("hybridflow.agents.episode_host", log_path)
        self._lines.socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lines.socket, self._receive)
        self.tell({"environment": absolute_entry(str(config.environment)), "parent": os.getpid()})

    def tell(self, message: dict[str, Any]) -> None:
        """Queue a message. Messages queued in the same iteration of the event loop are sent
        together. Raises ValueError for values that JSON cannot represent."""
        if self.ended:
            return
        self._lines.queue(message)
        if not self._loop.is_closed():
            self._loop.call_soon(self._flush)

    async def ask(self, message: dict[str, Any]) -> Any:
        """Send a message and wait for the reply. Raises EpisodeError."""
        if self.ended:
            raise EpisodeError(f"the environment process {self.ended}")
        self._asked += 1
        number = self._asked
        answer = self._loop.create_future()
        if not self.waiting:
            self._moved = time.monotonic()
        self.waiting[number] = answer
        try:
            self.tell({"id": number, **message})
            if self._timer is None:
                self._watch()
            return await answer
        except ValueError as error:
            raise EpisodeError(
                f"a prompt row contains {error}; environments accept only plain data"
            ) from error
        finally:
            self.waiting.pop(number, None)

    def _watch(self) -> None:
        """Kill the process if it has pending requests but has been silent for too long. Otherwise,
        schedule the next check.
        """
        self._timer = None
        if self._left_s() <= 0:
            self._receive()  # messages that arrived while the event loop was blocked
        if not self.waiting or self.ended:
            return
        if self._left_s() > 0:
            self._timer = self._loop.call_later(self._left_s(), self._watch)
        else:
            key = " (rollout.agent.tool_timeout_s)" if self._has_started else ""
            self.end(f"sent nothing for {self._limit_s:g} s{key} and was killed")

    def _left_s(self) -> float:
        """Return the number of seconds until the process is considered hung."""
        return self._moved + self._limit_s - time.monotonic()

    def _flush(self) -> None:
        if self.ended:
            return
        is_left = self._lines.flush()
        if is_left:
            self._loop.add_writer(self._lines.socket, self._flush)
        else:
            self._loop.remove_writer(self._lines.socket)

    def _receive(self) -> None:
        if self.ended:
            return
        messages = self._lines.received()
        if messages is None:
            self.end("")
            return
        for message in messages:
            self._moved = time.monotonic()
            if "ready" in message:
                self._limit_s = self.config.tool_timeout_s
                self._has_started = True
                if self._timer is not None:
                    self._timer.cancel()
                    self._watch()
            answer = self.waiting.get(message.get("id", 0))
            if answer is None or answer.done():
                continue
            if "failure" in message:
                answer.set_exception(EpisodeError(message["failure"]))
            else:
                answer.set_result(message.get("step"))

    def end(self, why: str) -> None:
        """Kill the process, and fail all pending requests with the reason `why`. An empty reason
        means that the process exited on its own.
        """
        if self.ended:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._lines.socket)
            self._loop.remove_writer(self._lines.socket)
        self._lines.socket.close()
        if why:
            self._popen.kill()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_S)
        self.ended = why or f"exited with code {self._popen.returncode}"
        for answer in self.waiting.values():
            if not answer.done() and not self._loop.is_closed():
                answer.set_exception(EpisodeError(f"the environment process {self.ended}"))


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end("is no longer needed")
