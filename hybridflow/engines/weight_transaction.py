"""One engine's side of a weight sync, driven by its worker over HTTP. The engine loads all weights
or none, and never generates a token with a mix of versions. It is paused before anything is
written, and resumes under the new version's name only after every rank has reported success. After
any failure it stays paused under the old version's name, until the next order. The server's HTTP
response is ignored, because SGLang reports success even if the loader failed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, cast

from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError, EngineSilent, WeightSyncError
from hybridflow.process.store import StoreError
from hybridflow.sync import session
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import (
    DESCRIBE,
    RECEIVE,
    REPORT_GRACE_S,
    Board,
    Control,
    Order,
    Outcome,
    PauseMode,
    RankReport,
    answer_deadline,
)


class EngineClient(Protocol):
    """Interface of the client of an engine's server, as used in a transaction. All calls have
    deadlines and raise EngineError.
    """

    def pause(self, mode: PauseMode) -> None:
        """Stop generating."""

    def resume(self) -> None:
        """Continue generating after `pause`."""

    def begin_weight_update(self) -> None:
        """Open the session that `call_ranks` requires."""

    def end_weight_update(self) -> None:
        """Close the session."""

    def call_ranks(self, control: Control, *, flush_cache: bool = True) -> None:
        """Deliver the message to HybridFlow's code in every rank, wait until all have handled it,
        and drop cached prefixes.
        """

    def set_weight_version(self, version: int | str) -> None:
        """Set the weight version that is reported for later tokens."""


class _Unusable(WeightSyncError):
    """Raised if a rank does not report or the update session cannot be closed, so that the engine
    cannot process further orders.
    """


def _report_deadline(timeout_s: float, stages: int) -> float:
    """Return the deadline in seconds for the ranks' reports after the server's response. With
    several pipeline stages, the server responds as soon as the first stage has handled the
    message."""
    return answer_deadline(timeout_s) if stages > 1 else REPORT_GRACE_S


def describe(
    client: EngineClient, spec: EngineSpec, host: str, port: int, timeout_s: float
) -> EngineLayout:
    """Have all ranks of an engine trace and post their layouts. The engine must have no requests in
    flight.

    Raises:
        WeightSyncError: a rank could not trace its loader or did not report. The message names the
            engine and the rank.
        EngineError: the engine does not respond.
    """
    store = session.connect(host, port, timeout_s)
    control = Control(
        DESCRIBE, host, port, timeout_s, f"described/{spec.name}/{time.time_ns()}", 0, spec.ranks
    )
    client.begin_weight_update()
    client.call_ranks(control, flush_cache=False)
    reports = session.read_reports(
        store, control.report, range(spec.ranks), _report_deadline(timeout_s, spec.pipeline)
    )
    client.end_weight_update()
    _check_reports(spec.name, range(spec.ranks), reports, "")
    return EngineLayout(spec.name, tuple(reports[rank].layout for rank in range(spec.ranks)))


def receive(client: EngineClient, order: Order, plan: str, stages: int = 1) -> Outcome:
    """Execute an order. Never raises a HybridFlowError; failures are part of the returned outcome.

    Args:
        plan: digest of the plan built from this engine's description.
        stages: number of pipeline stages of the engine.
    """
    started = time.perf_counter()
    board = None
    status = "refused"
    try:
        board = Board.open(order)
        _compare(board, plan)
        status = "stale"
        reports = _transact(client, board, _report_deadline(order.endpoint.timeout_s, stages))
    except (WeightSyncError, EngineError, StoreError) as error:
        if board is not None:
            with suppress(StoreError):  # without the store, peers cannot be notified
                board.call_off(str(error))
        if isinstance(error, EngineSilent | _Unusable):
            status = "lost"
        return Outcome(
            order.engine,
            order.number,
            status,
            f"{order.describe()}: {error}",
            0,
            time.perf_counter() - started,
        )
    # the keys vanish with the store; the rank that serves it reports errors
    with suppress(StoreError):
        board.clear()
    nbytes = sum(report.nbytes for report in reports.values())
    return Outcome(order.engine, order.number, "served", "", nbytes, time.perf_counter() - started)


def _compare(board: Board, plan: str) -> None:
    """Raise WeightSyncError unless the engine, the order and all senders use the same plan and
    version. Called before the engine is paused.
    """
    order = board.order
    if order.plan != plan:
        raise WeightSyncError(
            f"{order.engine} uses plan {plan[:12]}, but the order is for plan {order.plan[:12]}; "
            "make a new plan"
        )
    for sender, announced in board.announcements(order.endpoint.timeout_s).items():
        if announced.plan != plan:
            raise WeightSyncError(
                f"trainer rank {sender} uses plan {announced.plan[:12]}, but {order.engine} uses "
                f"plan {plan[:12]}; make a new plan"
            )
        if announced.version != order.version:
            raise WeightSyncError(
                f"trainer rank {sender} has weight version {announced.version}, expected "
                f"{order.version}"
            )


def _transact(client: EngineClient, board: Board, report_s: float) -> dict[int, RankReport]:
    """Pause the engine, have the ranks receive the weights, and resume. `report_s` is the deadline
    in seconds for reports after the server's response."""
    order = board.order
    endpoint = board.order.endpoint
    refusal = ""
    ranks = endpoint.receivers
    control = Control(
        RECEIVE,
        endpoint.host,
        endpoint.port,
        endpoint.timeout_s,
        board.report_prefix,
        ranks[0],
        len(ranks),
        order,
    )
    client.pause(cast(PauseMode, order.pause))
    client.begin_weight_update()
    # not earlier, because senders would wait while the engine finishes its requests
    board.go()
    try:
        # requests paused in place keep their KV cache, so SGLang would reject a flush (400)
        client.call_ranks(control, flush_cache=order.pause != "in_place")
    except EngineSilent:
        raise
    except EngineError as error:
        refusal = str(error)
    reports = board.reports(report_s)
    try:
        client.end_weight_update()
    except EngineError as error:
        raise _Unusable(
            f"{order.engine}: could not close the update session, which blocks the next one: "
            f"{error}"
        ) from error
    _check_reports(order.engine, ranks, reports, refusal)
    client.set_weight_version(order.version)
    client.resume()
    return reports


def _check_reports(
    engine: str, ranks: tuple[int, ...] | range, reports: Mapping[int, RankReport], refusal: str
) -> None:
    """Raise an error unless every rank has reported success."""
    causes_first = sorted(reports.values(), key=lambda report: report.called_off)
    faults = [f"{engine} {report.error}" for report in causes_first if report.error]
    silent = [str(rank) for rank in ranks if rank not in reports]
    if refusal:
        raise WeightSyncError("; ".join([*faults, refusal]))
    if silent:
        raise _Unusable(
            "; ".join([*faults, f"{engine}: rank(s) {', '.join(silent)} did not report"])
        )
    if faults:
        raise WeightSyncError("; ".join(faults))
