"""The training loop's rollout service, built on the engines' workers. It selects the engines that
accept requests, and recovers if one is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.schema import RunConfig
from hybridflow.engines.base import Extras
from hybridflow.engines.supervisor import UP, EngineState
from hybridflow.errors import EnginesLostError, WorkerError
from hybridflow.rollout.protocols import SyncReport, WeightSync
from hybridflow.rollout.requests import Requests, extras_for
from hybridflow.single_controller import Pending, ThreadGroup, WorkerGroup
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker

# for calls that do not wait for an engine, except to probe one that does not respond
_CALL_S = 120.0
_COLLECT = {
    Extras(): RolloutWorker.collect,
    Extras(routes=True): RolloutWorker.collect_with_routes,
    Extras(support=True): RolloutWorker.collect_with_support,
    Extras(routes=True, support=True): RolloutWorker.collect_with_routes_and_support,
}
_SO_FAR = {
    Extras(): RolloutWorker.so_far,
    Extras(routes=True): RolloutWorker.so_far_with_routes,
    Extras(support=True): RolloutWorker.so_far_with_support,
    Extras(routes=True, support=True): RolloutWorker.so_far_with_routes_and_support,
}
_log = logging.getLogger(__name__)


class EngineGroup(Requests):
    """Implementation of `Engines` using the engines' workers.

    Args:
        group: one worker per engine (`RolloutWorker`).
        stop_ids: tokens that end a response.
        others: workers of multi-node engines on all nodes except the first (`RolloutNodeWorker`).
    """

    def __init__(
        self,
        group: WorkerGroup | ThreadGroup,
        config: RunConfig,
        stop_ids: Sequence[int],
        others: WorkerGroup | None = None,
    ) -> None:
        super().__init__(config)
        self.group = group
        self.stop_ids = list(stop_ids)
        self.others = others
        self.weights: WeightSync | None = None  # set once the policy's ranks are available
        self.stale = dict.fromkeys(range(group.world_size), "no weights yet")
        self._ready: Pending | None = self._when_ready()

    def _when_ready(self) -> Pending:
        timeout = self.config.rollout.start_timeout_s + 30
        return self.group.call(RolloutWorker.wait_ready, timeout=timeout)

    async def check_starting(self) -> None:
        """Raise if an engine has failed to start; otherwise return immediately."""
        if self._ready is not None and self._ready.done():
            await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until all engines serve requests."""
        if self._ready is not None:
            await self._ready
            self._ready = None

    def workers_alive(self) -> bool:
        """Return True if every engine's worker is running, on each of its nodes."""
        return self.group.is_alive() and (self.others is None or self.others.is_alive())

    async def restart_workers(self) -> None:
        """Restart all workers and their engines. Restart hooks (`WorkerGroup.on_restart`) restore
        the connections for weight syncs.
        """
        if self.others is not None and not self.others.is_alive():
            # before the first nodes' workers, which decide when an engine starts
            await self.others.restart()
        await self.group.restart()

    async def begin_again(self) -> None:
        """Wait until the engines of restarted workers are ready. These engines have no weights
        yet."""
        self.stale = dict.fromkeys(range(self.group.world_size), "no weights yet")
        self._ask_again()
        self._ready = self._when_ready()
        await self.wait_ready()

    async def states(self, wait_s: float = 0.0) -> list[EngineState]:
        """Return the state of each engine, after waiting up to `wait_s` for restarts in progress.
        Engines that have exited are restarted.

        Raises:
            WorkerError: a worker was lost. Without all of its workers, a multi-node engine could
                not restart.
        """
        if self.others is not None:
            await self.others.call(RolloutNodeWorker.is_following, timeout=60)
        states: list[EngineState] = await self.group.call(
            RolloutWorker.engine_state, wait_s, timeout=wait_s + 60
        )
        return states

    def quarantine(self, stale: Mapping[int, str]) -> None:
        """Exclude exactly these engines from serving requests; all others serve. `stale` contains
        the reason for each excluded engine.
        """
        for number in sorted(stale.keys() - self.stale.keys()):
            _log.warning("engine-%d is excluded from requests: %s", number, stale[number])
        for number in sorted(self.stale.keys() - stale.keys()):
            _log.info("engine-%d accepts requests again", number)
        self.stale = dict(stale)

    async def sleep(self) -> None:
        """Release the memory of every engine."""
        await self.group.call(RolloutWorker.sleep)

    async def wake(self, tags: Sequence[str]) -> None:
        """Reallocate memory for the given parts in every engine."""
        await self.group.call(RolloutWorker.wake, list(tags))

    async def load_metrics(self) -> dict[str, float]:
        """Return the engines' load since the last call; empty if a worker is lost."""
        try:
            loads = await self.group.call(RolloutWorker.take_load, timeout=_CALL_S)
        except WorkerError:  # the next request reports it
            return {}
        return over_engines(loads)

    async def stop(self) -> None:
        """Stop the engines."""
        await self.group.call(RolloutWorker.stop, timeout=30)

    async def sync(self, version: int) -> SyncReport:
        """Transfer the policy's weights to the engines."""
        assert self.weights is not None
        return await self.weights.sync(version)

    # ---- the engine interface of `Requests`

    def _serving(self) -> Sequence[int]:
        healthy = [number for number in range(self.group.world_size) if number not in self.stale]
        if not healthy:
            reasons = "; ".join(self.stale.values())
            raise EnginesLostError(f"no engine is left to serve requests: {reasons}")
        return healthy

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        prompts = list(parts.values())
        count = len(prompts)
        await self.group.call(
            RolloutWorker.ask,
            prompts,
            [self._sampling(training, prompts[0])] * count,
            [self.stop_ids] * count,
            [extras_for(self.config, training)] * count,
            timeout=_CALL_S,
            only=list(parts),
        )

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        method = collect_method(self.config) if training else RolloutWorker.collect
        answers: list[DataProto] = await self.group.call(
            method, wait_s, timeout=wait_s + _CALL_S, only=engines
        )
        return answers

    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        method = _SO_FAR[extras_for(self.config, training=True)]
        try:
            answers: list[DataProto] = await self.group.call(method, timeout=_CALL_S, only=engines)
        except WorkerError as error:  # the next round will also raise it
            _log.warning(
                "could not read the partial answers from the engines, so they are not saved: %s",
                error,
            )
            return []
        return answers

    async def _leave_out_lost(self, answers: int) -> None:
        lost = {}
        for number, state in enumerate(await self.states()):
            if not state.has_weights:
                found = "without weights" if state.state == UP else state.state
                lost[number] = f"{state.name} is {found}: {state.reason}"
        self.quarantine(self.stale | lost)
        self._serving()
        _log.warning(
            "%d answers were interrupted when an engine was lost; they resume on the remaining "
            "engines",
            answers,
        )

    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        try:
            await self.group.call(
                RolloutWorker.abort_requests,
                list(tickets.values()),
                timeout=_CALL_S,
                only=list(tickets),
            )
        except WorkerError:
            if self.workers_alive():
                raise  # lost workers have lost their requests too

    async def _forget(self, engines: Sequence[int]) -> None:
        await self.group.call(RolloutWorker.forget_requests, timeout=_CALL_S, only=engines)


def collect_method(config: RunConfig) -> Callable[..., Any]:
    """Return the worker method that collects training answers with the required extras."""
    return _COLLECT[extras_for(config, training=True)]


def over_engines(loads: list[dict[str, float]]) -> dict[str, float]:
    """Merge the engines' loads into a step's `engine/...` metrics: the average of the means and the
    maximum of the maxima.
    """
    by_name: dict[str, list[float]] = {}
    for load in loads:
        for name, value in load.items():
            by_name.setdefault(name, []).append(value)
    found = {}
    for name, values in by_name.items():
        merged = max(values) if name.endswith("/max") else np.mean(values)
        found[f"engine/{name}"] = float(merged)
    return found
