"""Control messages of a weight sync between trainer, engine workers and engine ranks.

Messages are plain data, stored as JSON under keys of one store. At start-up the trainer posts the
catalog of HF tensors, engine ranks post their layouts, and the trainer posts the plan's schedules.
In a sync each engine has an `Order`, and a `Board` of keys for that order:

    sender          announce(plan, version) ─ wait for go ─ open, send
    engine worker   compare announcements ─ pause, begin ─ go ─ call the ranks ─ reports ─ end
                    ─ version ─ continue
    engine rank     open, receive ─ staged ─ decide ─ copy ─ report

`decide` is a single compare-and-set, so either all ranks of an engine copy or none do, regardless
of which one reaches a deadline first.

An engine's worker calls HybridFlow's code inside the engine's ranks with a `Control`. How it is
delivered depends on the kind of engine.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal

from hybridflow.errors import WeightSyncError
from hybridflow.process.rendezvous import client_store
from hybridflow.process.store import StoreClient
from hybridflow.sync.transports.base import Endpoint

CATALOG_KEY = "catalog"
PLANS_KEY = "plans"  # the digest of the plan, then that of its part for adapters if there is one
COMMIT = "commit"
ABORT = "abort"
# a rank reports before its engine answers, so a report later than this will not arrive
REPORT_GRACE_S = 5.0
_GO = "go"
_NOTHING = "nothing"
DESCRIBE = "describe"
RECEIVE = "receive"
PauseMode = Literal["abort", "retract", "in_place"]  # treatment of requests in flight


@dataclass(frozen=True)
class Order:
    """One attempt to deliver one weight version to one engine.

    Created by the driver; read by the senders, the engine worker and the engine ranks.

    Attributes:
        engine: name, for error messages.
        number: index among the plan's engines.
        endpoint: endpoint of the session that carries the messages. Its `timeout_s` limits each
            individual wait of this attempt.
        attempt: unique within the session.
        version: weight version.
        plan: digest of the slice plan.
        staged: if True, receive everything before any rank of the engine copies; if False, write
            messages as they arrive.
        pause: retract | abort | in_place, SGLang's handling of requests in flight.
    """

    engine: str
    number: int
    endpoint: Endpoint
    attempt: int
    version: int
    plan: str
    staged: bool = True
    pause: str = "retract"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Order:
        """Rebuild an order from `dataclasses.asdict` after a JSON round trip."""
        return cls(**{**data, "endpoint": Endpoint.from_dict(data["endpoint"])})

    def describe(self) -> str:
        """Return a description such as `weight version 3 to engine-0 (session engine-0.1, attempt
        7)`."""
        return (
            f"weight version {self.version} to {self.engine} (session {self.endpoint.session}, "
            f"attempt {self.attempt})"
        )


@dataclass(frozen=True)
class RankReport:
    """Result of an action on one engine rank. `error` is empty on success.

    `called_off` is True if the order had already been called off, so that `error` is a consequence
    and not the cause.
    """

    rank: int
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    layout: str = ""
    pid: int = 0
    called_off: bool = False


@dataclass(frozen=True)
class Announcement:
    """The plan and weight version that a sender is ready to send."""

    plan: str
    version: int


@dataclass(frozen=True)
class Outcome:
    """Result of an order, as seen by one end.

    Attributes:
        rank: the trainer rank for a sender, -1 for the engine.
        status: served (the engine uses the new weights), refused (nothing was modified), stale
            (paused, accepts the next order), lost (exited or unresponsive: must be restarted). A
            sender reports only served and stale.
    """

    engine: str
    number: int
    status: str
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    rank: int = -1


@dataclass
class Board:
    """The keys of one order.

    Each thread needs a separate store client, because a waiting client blocks its other callers.
    """

    store: StoreClient
    order: Order
    _used: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, order: Order, store: StoreClient | None = None) -> Board:
        """Open the board, with a new store client unless one is given.

        Raises:
            WeightSyncError: the store cannot be reached within the order's `timeout_s`.
        """
        return cls(
            store or connect(order.endpoint.host, order.endpoint.port, order.endpoint.timeout_s),
            order,
        )

    # ---- senders

    def announce(self, sender: int, announcement: Announcement) -> None:
        """Announce the plan and the version that this trainer rank will send."""
        self.store.set(self._key(f"announced/{sender}"), json.dumps(asdict(announcement)))

    def wait_for_go(self, timeout_s: float) -> None:
        """Wait until the engine is ready to receive.

        Raises:
            WeightSyncError: the engine worker called the order off, or the deadline has passed.
        """
        self._wait({self._key("go"): ""}, timeout_s, "no go-ahead from the engine worker")
        answer = self.store.get(self._key("go")).decode()
        if answer != _GO:
            raise WeightSyncError(f"{self.order.describe()} was cancelled: {answer}")

    # ---- the engine worker

    def announcements(self, timeout_s: float) -> dict[int, Announcement]:
        """Wait for the announcements of all senders. Raises a WeightSyncError that names the
        senders missing at the deadline.
        """
        keys = {sender: self._key(f"announced/{sender}") for sender in self.order.endpoint.senders}
        names = {key: f"trainer rank {sender}" for sender, key in keys.items()}
        self._wait(names, timeout_s, "no announcement from")
        found: dict[int, Announcement] = {}
        for sender, key in keys.items():
            found[sender] = Announcement(**json.loads(self.store.get(key)))
        return found

    def go(self) -> None:
        """Signal to the senders that they may start sending."""
        self.store.compare_set(self._key("go"), "", _GO)

    def call_off(self, reason: str) -> None:
        """Call the order off. From then on no rank may copy, and senders that are waiting for the
        go signal stop waiting."""
        self.decide(ABORT)
        self.store.compare_set(self._key("go"), "", reason)

    def reports(self, timeout_s: float) -> dict[int, RankReport]:
        """Return the engine ranks' reports, keyed by plan rank. Reports missing at the timeout are
        omitted."""
        return read_reports(self.store, self._key("done"), self.order.endpoint.receivers, timeout_s)

    def clear(self) -> None:
        """Delete the order's keys."""
        ranks = self.order.endpoint.receivers
        senders = self.order.endpoint.senders
        names = [
            "go",
            "decision",
            *(f"{kind}/{rank}" for kind in ("staged", "done") for rank in ranks),
        ]
        for name in [*names, *(f"announced/{sender}" for sender in senders)]:
            self.store.delete_key(self._key(name))

    # ---- engine ranks

    @property
    def report_prefix(self) -> str:
        """Key prefix of the engine ranks' reports, `PREFIX/RANK`."""
        return self._key("done")

    def staged(self, rank: int) -> None:
        """Mark this rank as having received and verified everything."""
        self.store.set(self._key(f"staged/{rank}"), "1")

    def wait_all_staged(self, timeout_s: float) -> None:
        """Wait until every rank of the engine has staged all weights. Raises a WeightSyncError that
        names the ranks that have not.
        """
        names = {}
        for rank in self.order.endpoint.receivers:
            names[self._key(f"staged/{rank}")] = f"rank {rank}"
        self._wait(names, timeout_s, "weights not fully received by")

    def decide(self, wish: str) -> str:
        """Decide COMMIT or ABORT. The first caller's choice wins; all callers get the same
        result."""
        return self.store.compare_set(self._key("decision"), "", wish).decode()

    def decision(self) -> str:
        """Return the decision without waiting; empty if there is none yet."""
        # `get` would block on a missing or deleted key. A compare-and-set that cannot succeed
        # returns the expected value instead.
        answer = self.store.compare_set(self._key("decision"), _NOTHING, _NOTHING).decode()
        return "" if answer == _NOTHING else answer

    # ---- internals

    def _key(self, name: str) -> str:
        return f"{self.order.endpoint.session}/{self.order.attempt}/{name}"

    def _wait(self, names: Mapping[str, str], timeout_s: float, what: str) -> None:
        """Wait for the keys in `names`. The error contains `what` and the names of the missing
        keys."""
        if wait_for(self.store, [*names], timeout_s):
            return
        silent = []
        for key, name in names.items():
            if name and not self.store.check([key]):
                silent.append(name)
        who = f" {', '.join(silent[:8])}" if silent else ""
        raise WeightSyncError(f"{self.order.describe()}: {what}{who} after {timeout_s:g} s")


def connect(host: str, port: int, timeout_s: float) -> StoreClient:
    """Connect to the store. Raises WeightSyncError if it cannot be reached."""
    try:
        return client_store(host, port, timeout_s)
    except RuntimeError as error:
        raise WeightSyncError(
            f"could not reach the weight-sync store at {host}:{port} within {timeout_s:g} s: "
            f"{error}"
        ) from error


def wait_for(store: StoreClient, keys: Sequence[str], timeout_s: float) -> bool:
    """Return True if all keys exist by the deadline. Raises WeightSyncError if the store itself
    cannot be reached."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if "timeout" in str(error).lower() or "timed out" in str(error).lower():
            return False
        raise WeightSyncError(f"lost the connection to the weight-sync store: {error}") from error
    return True


def read(store: StoreClient, key: str, timeout_s: float) -> Any:
    """Read the JSON under a key. Raises WeightSyncError if the key does not exist by the
    deadline."""
    if not wait_for(store, [key], timeout_s):
        raise WeightSyncError(f"{key} not found in the weight-sync store after {timeout_s:g} s")
    return json.loads(store.get(key))


def write_report(store: StoreClient, prefix: str, report: RankReport) -> None:
    """Post a rank's report."""
    store.set(f"{prefix}/{report.rank}", json.dumps(asdict(report)))


def read_reports(
    store: StoreClient, prefix: str, ranks: Collection[int], timeout_s: float
) -> dict[int, RankReport]:
    """Return the reports that have been posted by the deadline."""
    keys = {rank: f"{prefix}/{rank}" for rank in ranks}
    wait_for(store, list(keys.values()), timeout_s)
    reports: dict[int, RankReport] = {}
    for rank, key in keys.items():
        if store.check([key]):
            reports[rank] = RankReport(**json.loads(store.get(key)))
    return reports


def problem_of(error: BaseException) -> str:
    """Format an error. Errors other than WeightSyncError are prefixed with their type."""
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"


def answer_deadline(timeout_s: float) -> float:
    """Return the timeout in seconds for a control call to an engine.

    Covers one wait for the rendezvous, one for a message, and the time to report.
    """
    return 2 * timeout_s + REPORT_GRACE_S


def refuse(order: Order, reason: str) -> Outcome:
    """Reject an order that the engine cannot accept: notify the order's senders and return the
    outcome."""
    with suppress(RuntimeError, WeightSyncError):
        Board.open(order).call_off(reason)
    return Outcome(order.engine, order.number, "refused", f"{order.describe()}: {reason}")


@dataclass(frozen=True)
class Control:
    """A command to the engine's ranks.

    Attributes:
        action: DESCRIBE or RECEIVE.
        host, port: address of the weight-sync store.
        timeout_s: maximum duration of each wait in seconds.
        report: prefix of the store keys under which ranks post their reports.
        first_rank: index of the engine's first rank in the plan.
        ranks: number of ranks in the engine.
        order: the weights to receive; only for RECEIVE.
    """

    action: str
    host: str
    port: int
    timeout_s: float
    report: str
    first_rank: int
    ranks: int
    order: Order | None = None

    def to_json(self) -> str:
        """Serialize to one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Control:
        """Parse the result of `to_json`."""
        data: Mapping[str, Any] = json.loads(text)
        return cls(**{**data, "order": Order.from_dict(data["order"]) if data["order"] else None})
