"""The loop's rollout service over the engines' workers: which engine gets which prompts, and what happens when one is
lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.engines.supervisor import UP, EngineState
from hybridflow.errors import EngineError, EnginesLostError
from hybridflow.rollout.continuation import continued, cut_short, joined
from hybridflow.single_controller import Future, WorkerGroup
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker

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
        go on with its answers from their last tokens.

        Raises:
            EnginesLostError: there are no others. The lost ones are being started again, and hold no weights.
            EngineError: an engine refused, and still runs.
        """
        limit = self.config.data.max_response_length
        answers = self._ask(prompts, limit, training)
        while len(cut := cut_short(answers)):
            self._leave_out_lost(len(cut))
            begun = answers.rows(cut).fetch()
            room = limit - int(begun.lengths("response_ids").min())
            answers = joined(answers, cut, self._ask(continued(prompts.rows(cut), begun), room, training), limit)
        return answers

    def _ask(self, prompts: DataProto, limit: int, training: bool) -> DataProto:
        """Answers of up to `limit` tokens; engines that are lost cut theirs short."""
        sampling = self.config.rollout.sampling if training else self.config.rollout.val_sampling
        healthy = [number for number in range(self.group.world_size) if number not in self.stale]
        # validation has no use for routes, which are large
        method = generate_method(self.config) if training else RolloutWorker.generate
        timeout = longest_wait(self.config, math.ceil(len(prompts) / max(1, len(healthy))))
        return as_batch(self.group.run(method, prompts, sampling, limit, self.stop_ids, timeout=timeout, only=healthy))

    def _leave_out_lost(self, answers: int) -> None:
        """Ask no engine again that has cut answers short."""
        lost = {
            n: f"{state.name} is {'without weights' if state.state == UP else state.state}: {state.reason}"
            for n, state in enumerate(self.states())
            if not state.has_weights
        }
        if not lost.keys() - self.stale.keys():
            raise EngineError(f"{answers} answers were cut short, and no engine is lost")
        self.quarantine(self.stale | lost)
        if len(self.stale) == self.group.world_size:
            raise EnginesLostError(f"no engine is left that could answer: {'; '.join(self.stale.values())}")
        _log.warning("an engine was lost while it generated; the others go on with its %d answers", answers)

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

    def states(self, wait_s: float = 0.0) -> list[EngineState]:
        """The state of each engine, after waiting up to `wait_s` for restarts in progress. Engines that have ended are
        started again.

        Raises:
            WorkerError: a worker is lost. Without that of another node an engine cannot start again, and would wait for
            it in vain.
        """
        if self.others is not None:
            self.others.run(RolloutNodeWorker.is_following, timeout=60)
        states: list[EngineState] = self.group.run(RolloutWorker.engine_state, wait_s, timeout=wait_s + 60)
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
