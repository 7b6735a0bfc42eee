"""The loop's rollout service over the engines' workers: which engine gets which prompts, and what happens when one is
lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.engines.supervisor import UP, EngineState
from hybridflow.errors import EngineError, EngineSilent, EnginesLostError
from hybridflow.single_controller import Future, WorkerGroup
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker

_SETTLE_S, _SETTLE_POLL_S = 10.0, 0.2  # an engine that does not answer is found to have ended within this, or it hangs
_MARGIN_S = 30.0
_SLOWEST_TOKEN_S = 1.0  # of a request that runs
_log = logging.getLogger(__name__)


class EngineGroup:
    """`RolloutService` over the workers of the engines.

    Args:
        group: one worker for each engine (`RolloutWorker`).
        stop_ids: tokens that end a response.
        others: of engines over several nodes, the workers on the nodes but the first (`RolloutNodeWorker`).
    """

    def __init__(
        self, group: WorkerGroup, config: RunConfig, stop_ids: Sequence[int], others: WorkerGroup | None = None
    ) -> None:
        self.group, self.config, self.stop_ids, self.others = group, config, list(stop_ids), others
        self.stale = dict.fromkeys(range(group.world_size), "no weights yet")
        self._ready: Future | None = group.submit(RolloutWorker.wait_ready, timeout=config.rollout.start_timeout_s + 30)

    def check_starting(self) -> None:
        """Raise at once when an engine has failed to start; return when all is well so far."""
        if self._ready is not None and self._ready.done():
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all engines serve."""
        if self._ready is not None:
            self._ready.result()
            self._ready = None

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        """Answer the prompts. Only engines that took the last weights get rows; when one is lost over them, the others
        answer all again.

        Raises:
            EnginesLostError: there are no others. The lost ones are being started again, and hold no weights.
            EngineError: an engine refused, and still runs.
        """
        rollout, limit = self.config.rollout, self.config.data.max_response_length
        sampling = rollout.sampling if training else rollout.val_sampling
        while True:
            healthy = [number for number in range(self.group.world_size) if number not in self.stale]
            timeout = longest_wait(self.config, math.ceil(len(prompts) / max(1, len(healthy))))
            arguments = (prompts, sampling, limit, self.stop_ids)
            # validation has no use for routes, which are large
            method = generate_method(self.config) if training else RolloutWorker.generate
            try:
                return as_batch(self.group.run(method, *arguments, timeout=timeout, only=healthy))
            except EngineError as error:
                lost = self._lost(error, timeout)
                if not lost.keys() - self.stale.keys():
                    raise
                self.quarantine(self.stale | lost)
                if len(self.stale) == self.group.world_size:
                    reasons = "\n".join(f"  - {why}" for why in self.stale.values())
                    raise EnginesLostError(
                        f"no engine is left that could answer: {str(error).splitlines()[0]}\n{reasons}"
                    ) from error
                _log.warning(
                    "an engine was lost while it generated; the others answer its prompts: %s",
                    str(error).splitlines()[0],
                )
                _log.info("%s", error)

    def _lost(self, error: EngineError, busy_s: float) -> dict[int, str]:
        """Engines that cannot answer, after an error of one; one that hangs is given up. The others may still be at
        their share for `busy_s`."""
        silent, settled = isinstance(error, EngineSilent), time.monotonic() + _SETTLE_S
        while True:
            states = self.states(busy_s=busy_s)
            lost = {
                n: f"{state.name} is {'without weights' if state.state == UP else state.state}: {state.reason}"
                for n, state in enumerate(states)
                if not state.has_weights
            }
            if lost.keys() - self.stale.keys() or not silent:
                return lost
            if time.monotonic() > settled:
                silent = False
                hanging = [number for number, state in enumerate(states) if state.name == error.engine]
                if hanging:
                    self.group.run(RolloutWorker.replace_engine, str(error).splitlines()[0], only=hanging)
            time.sleep(_SETTLE_POLL_S)

    def workers_alive(self) -> bool:
        """Whether every engine's worker still runs, on each of its nodes."""
        return self.group.is_alive() and (self.others is None or self.others.is_alive())

    def restart_workers(self) -> None:
        """Start all workers, and with them all engines, again; the hooks of `WorkerGroup.restart` bring their weight
        connections back."""
        if self.others is not None and not self.others.is_alive():
            self.others.restart()  # before the first nodes: it is theirs to say when an engine starts
        self.group.restart()

    def begin_again(self) -> None:
        """After the workers were started again: wait for their engines, which hold no weights."""
        self.stale = dict.fromkeys(range(self.group.world_size), "no weights yet")
        self._ready = self.group.submit(RolloutWorker.wait_ready, timeout=self.config.rollout.start_timeout_s + 30)
        self.wait_ready()

    def states(self, wait_s: float = 0.0, busy_s: float = 0.0) -> list[EngineState]:
        """The state of each engine, after waiting up to `wait_s` for restarts in progress. Engines that have ended are
        started again.

        Args:
            busy_s: how long a worker may still be at an earlier call before it answers.

        Raises:
            WorkerError: a worker is lost. Without that of another node an engine cannot start again, and would wait for
            it in vain.
        """
        if self.others is not None:
            self.others.run(RolloutNodeWorker.is_following, timeout=60)
        states: list[EngineState] = self.group.run(RolloutWorker.engine_state, wait_s, timeout=wait_s + busy_s + 60)
        return states

    def quarantine(self, stale: Mapping[int, str]) -> None:
        """From now on these engines, and no others, get no requests; `stale` says why."""
        for number in sorted(stale.keys() - self.stale.keys()):
            _log.warning("engine-%d gets no requests: %s", number, stale[number])
        for number in sorted(self.stale.keys() - stale.keys()):
            _log.info("engine-%d gets requests", number)
        self.stale = dict(stale)

    def sleep(self) -> None:
        """Have every engine give its memory back."""
        self.group.run(RolloutWorker.sleep)

    def wake(self, tags: Sequence[str]) -> None:
        """Have every engine take the memory of these parts again."""
        self.group.run(RolloutWorker.wake, list(tags))

    def stop(self) -> None:
        """Stop the engines."""
        self.group.run(RolloutWorker.stop, timeout=30)


def longest_wait(config: RunConfig, prompts: int) -> float:
    """Seconds after which an engine's worker must have answered so many prompts, however long the answers are.

    Workers give up an engine that is silent for `rollout.request_timeout_s`, and a worker that ends is noticed at once:
    this is for a worker that hangs.
    """
    rounds = math.ceil(prompts / config.rollout.max_running_requests)
    tokens = rounds * config.data.max_response_length
    return config.rollout.request_timeout_s + _MARGIN_S + tokens * _SLOWEST_TOKEN_S


def generate_method(config: RunConfig) -> Callable[..., Any]:
    """The worker method that answers prompts for training, with the engines' expert routes where they are needed."""
    return RolloutWorker.generate_with_routes if derived.needs_engine_routes(config) else RolloutWorker.generate


def as_batch(value: Any) -> DataProto:
    """What a call that collects a batch returned, typed as one."""
    assert isinstance(value, DataProto), type(value)
    return value
