"""A weight sync to all engines: selects the engines, retries, and excludes failed engines until the
next sync.

The transfer to each engine is a separate transaction (`Engine.receive`), driven by the engine's
worker while the policy's ranks send. An engine whose transaction fails stays paused and receives no
requests; the others continue. An engine that has exited is restarted by its worker and receives
weights in a later sync. If no engine is left, `RestartingSync` restarts the engines with their
workers within the step. Because the policy has not changed since the last sync, the new engines get
the same weight version.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.device.platform import Platform
from hybridflow.errors import HybridFlowError, WeightSyncError, WorkerError
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.rollout.protocols import SyncReport, WeightSync
from hybridflow.rollout.service import EngineGroup
from hybridflow.single_controller import WorkerGroup
from hybridflow.sync.schedule import PlanFacts
from hybridflow.sync.session import Order, Outcome, answer_deadline, refuse
from hybridflow.sync.transports import chosen
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.rollout import RolloutWorker

_MOST_SLOTS = 8  # more would not fit in the cache and would not help
# added to deadlines inside a call, so that those expire first: their messages are better
_MARGIN_S = 30.0
log = logging.getLogger(__name__)


class SliceSync:
    """A `WeightSync` that follows a plan: each slice is sent from a rank that stores it to the
    engine rank that needs it. The plan is verified before the first step.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        engines: EngineGroup,
        config: RunConfig,
        role: str | None = None,
    ) -> None:
        """`role`: the policy's name within its processes, if they contain several workers."""
        self._call = policy.call if role is None else partial(policy.call, role=role)
        self.engines = engines
        self.config = config
        self.sync_config = config.rollout.sync
        # sessions of a resumed job must not clash with files of an earlier one
        self._run = secrets.token_hex(4)
        self._sessions = [0] * config.rollout.num_engines
        self._restarts = [0] * config.rollout.num_engines
        # derived from the devices of the policy's ranks; the driver's machine may have none
        self._transport = ""
        self._keeps_messages = False
        self._staged = True
        self._attempts = 0
        self._at = ("", 0)
        self._plan: PlanFacts | None = None
        # by engine: it has had the weights, and needs only adapters; the plan of its session
        self._has_weights = [False] * config.rollout.num_engines
        self._last_plan = [""] * config.rollout.num_engines

    async def prepare(self) -> str:
        """Compute and verify the plan, before the first step and while all engines are up. Returns
        a one-line summary.

        Raises:
            WeightSyncError: the plan could not be verified, so no sync is possible.
        """
        wait = answer_deadline(self.sync_config.timeout_s) + _MARGIN_S
        platform = Platform(await self._call(PolicyWorker.device_kind))
        self._transport = chosen(
            self.sync_config.transport, platform, derived.shares_devices(self.config)
        )
        self._keeps_messages = TRANSPORTS.get(self._transport).keeps_messages
        self._staged = derived.is_staged(self.config, platform.kind)
        self._at = await self._call(PolicyWorker.open_sync_store)
        described = await self.engines.group.call(
            RolloutWorker.describe_weights, *self._at, timeout=2 * wait
        )
        plans: list[PlanFacts] = await self._call(PolicyWorker.plan_weights, *self._at, described)
        plan = plans[0]
        self._plan = plan
        await self.engines.group.call(RolloutWorker.adopt_plan, *plan.digests)
        self._has_weights = [False] * len(self._sessions)
        return plan.describe()

    async def reconnect(self) -> None:
        """Set up a new store, schedules and sessions after the policy's ranks or the engines'
        workers have been restarted.
        """
        self._sessions = [number + 1 for number in self._sessions]
        await self.engines.states(wait_s=self.config.rollout.start_timeout_s)
        await self.prepare()

    async def sync(self, version: int) -> SyncReport:
        """Send this version to every engine that is up. Engines that did not receive it are
        quarantined."""
        if self._plan is None:
            raise RuntimeError("sync() was called before prepare()")
        started = time.perf_counter()
        stale, nbytes = await self._round(version)
        nobody = len(stale) == len(self._sessions)
        if nobody and any(state.state == "starting" for state in await self.engines.states()):
            # a late sync is better than none
            await self.engines.states(wait_s=self.config.rollout.start_timeout_s)
            stale, nbytes = await self._round(version)
        self.engines.quarantine(stale)
        if len(stale) == len(self._sessions):
            reasons = "\n".join(f"  - {why}" for why in stale.values())
            raise WeightSyncError(f"weight version {version}: no engine received it\n{reasons}")
        named = {_name(number): why for number, why in stale.items()}
        seconds = time.perf_counter() - started
        return SyncReport(version, seconds, nbytes, named)

    async def _round(self, version: int) -> tuple[dict[int, str], int]:
        """Send the weights to all engines that are up, with retries. Returns the reason for each
        engine that did not receive them, and the number of bytes received by the others."""
        states = await self.engines.states()
        stale = {}
        pending = []
        for number, state in enumerate(states):
            if state.state == "up":
                pending.append(number)
            else:
                stale[number] = f"{state.name} is {state.state}: {state.reason}"
            # the other end of the session died with the engine's processes
            if state.restarts != self._restarts[number]:
                self._restarts[number] = state.restarts
                self._sessions[number] += 1
                self._has_weights[number] = False
        nbytes = 0
        for _ in range(1 + self.sync_config.max_retries):
            outcomes = await self._attempt(pending, version) if pending else []
            for outcome in outcomes:
                nbytes += outcome.nbytes
                stale.pop(outcome.number, None)
                if outcome.status != "served":
                    stale[outcome.number] = outcome.error
            pending = [outcome.number for outcome in outcomes if outcome.status == "stale"]
        return stale, nbytes

    async def _attempt(self, numbers: Sequence[int], version: int) -> list[Outcome]:
        """Execute one attempt, on the senders and on these engines. Returns the engines' outcomes,
        including the senders' errors.
        """
        self._attempts += 1
        orders = [self._order(number, version) for number in numbers]
        patience = answer_deadline(self.sync_config.timeout_s)
        # calls in an attempt: announce or pause, begin, load, a pipeline's reports, end
        wait = 5 * patience + _MARGIN_S
        sending = self._call(PolicyWorker.send_weights, orders, 3 * patience, timeout=wait)
        try:
            received: list[Outcome] = await self.engines.group.call(
                RolloutWorker.receive_weights, orders, timeout=wait, only=numbers
            )
        except HybridFlowError as error:
            # the engines' workers are lost, so the senders are told here whether to continue
            reason = str(error).splitlines()[0]
            for order in orders:
                refuse(order, reason)
            with suppress(HybridFlowError):
                await sending
            raise
        try:
            sent: list[Outcome] = [outcome for rank in await sending for outcome in rank]
        except HybridFlowError:
            # a trainer rank is lost: the run ends with its error, and the engine's error is only
            # logged
            failed = {o.number: o.error for o in received if o.status != "served"}
            self.engines.quarantine(self.engines.stale | failed)
            raise
        failing = {one.number for one in (*received, *sent) if one.status != "served"}
        for number in failing:
            self._sessions[number] += 1  # either end has closed the session
        joined = []
        for outcome in received:
            senders = [one for one in sent if one.number == outcome.number]
            joined.append(_joined(outcome, senders))
            # adapters that failed to arrive leave the weights as they are
            self._has_weights[outcome.number] |= outcome.status == "served"
        return joined

    def _order(self, number: int, version: int) -> Order:
        plan = self._facts(number)
        sync = self.sync_config
        name = _name(number)
        if self._last_plan[number] not in ("", plan.digest):
            self._sessions[number] += 1  # a session carries the messages of one plan
        self._last_plan[number] = plan.digest
        endpoint = Endpoint(
            transport=self._transport,
            session=f"{self._run}.{name}.{self._sessions[number]}",
            host=self._at[0],
            port=self._at[1],
            senders=plan.senders[number],
            receivers=plan.receivers[number],
            message_bytes=plan.message_bytes[number],
            timeout_s=sync.timeout_s,
            slots=self._slots(number),
        )
        return Order(
            name, number, endpoint, self._attempts, version, plan.digest, self._staged, sync.pause
        )

    def _facts(self, number: int) -> PlanFacts:
        """Return the plan for this engine's next sync: adapters only, or all weights."""
        assert self._plan is not None
        if self._has_weights[number] and self._plan.adapters is not None:
            return self._plan.adapters
        return self._plan

    def _slots(self, number: int) -> int:
        """Return the maximum number of messages in flight: as many as fit into the staging memory,
        or all messages if the engine's ranks stage them in shared memory."""
        plan = self._facts(number)
        if self._keeps_messages and self._staged:
            return max(2, plan.messages[number])
        share = self.sync_config.staging_bytes // len(self._sessions)
        return max(2, min(_MOST_SLOTS, share // plan.message_bytes[number]))


def _name(number: int) -> str:
    return f"engine-{number}"


def _joined(outcome: Outcome, senders: Sequence[Outcome]) -> Outcome:
    """Return the engine's outcome. If it failed, add the senders' errors to its error."""
    if outcome.status == "served":
        return outcome
    also = [one.error for one in senders if one.error and outcome.error not in one.error]
    return replace(outcome, error="; ".join([outcome.error, *also[:2]]))


class RestartingSync:
    """A `WeightSync` that restarts the engines if all of them are lost, during a sync or (through
    `recover`) during generation.

    Args:
        engines: the engines.
        weights: the wrapped sync.
        max_restarts: maximum number of restarts per hour; if 0, the first loss ends the job.
        told: callback that receives a one-line message for each restart.
    """

    def __init__(
        self,
        engines: EngineGroup,
        weights: WeightSync,
        max_restarts: int,
        told: Callable[[str], None],
    ) -> None:
        self.engines = engines
        self.weights = weights
        self._told = told
        self._restarts = RestartLimit(max_restarts)
        self._version = -1
        engines.recover = self.recover
        engines.weights = self

    async def recover(self, error: HybridFlowError) -> None:
        """Restart engines or workers that were lost while generating, and send them the weights of
        the last sync.

        Raises:
            HybridFlowError: `error` itself if `max_restarts` is used up, or an error during a
                restart. Engines must start within `rollout.start_timeout_s`.
        """
        if self._version < 0 or (isinstance(error, WorkerError) and self.engines.workers_alive()):
            raise error
        await self._restart(error)
        await self.weights.sync(self._version)  # waits for engines that are starting

    async def sync(self, version: int) -> SyncReport:
        """Transfer the weights to the engines. Lost workers are restarted; `weights` handles the
        loss of single engines."""
        self._version = version
        while True:
            try:
                return await self.weights.sync(version)
            except WorkerError as error:
                if self.engines.workers_alive():  # a rank of the policy was lost instead
                    raise
                await self._restart(error)

    async def _restart(self, error: HybridFlowError) -> None:
        """Restart lost workers. Raises `error` if no more restarts are allowed."""
        if not self._restarts.take():
            raise error
        log.info(
            "no engine is left; restarting all engines (%d more restarts allowed this hour): %s",
            self._restarts.left,
            error,
        )
        self._told(str(error).splitlines()[0])
        if not self.engines.workers_alive():
            await self.engines.restart_workers()
