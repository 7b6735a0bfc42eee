"""What `SliceSync` decides: who takes part, what is tried again, who is left out. The two ends are
stand-ins that follow a script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config.schema import RolloutConfig, RunConfig, SyncConfig
from hybridflow.engines.supervisor import EngineState
from hybridflow.errors import WeightSyncError, WorkerError
from hybridflow.rollout.weight_sync import SliceSync
from hybridflow.single_controller import block_on
from hybridflow.sync.schedule import EngineLayout, PlanFacts
from hybridflow.sync.session import Order, Outcome

FACTS = PlanFacts("d" * 64, 10, 0, (), (100, 100), ((0, 1), (1,)), ((0,), (1, 2)), (50, 60), (3, 4))
ALONE = PlanFacts("a" * 64, 2, 0, (), (4, 4), ((0,), (1,)), ((0,), (1, 2)), (2, 3), (2, 2))


class Answer:
    """A call on a group: its result, or its error, comes when it is awaited."""

    def __init__(self, result: Callable[[], Any]) -> None:
        self.result = result

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self.result()


class Ends:
    """The policy's group, the engines' group and `EngineGroup` in one. `statuses` has each
    attempt's status of each engine."""

    def __init__(
        self,
        statuses: Sequence[dict[int, str]],
        states: Sequence[str] = ("up", "up"),
        sender_dies: bool = False,
    ) -> None:
        self.kind = "cpu"
        self.statuses = list(statuses)
        self.state_names = list(states)
        self.sender_dies = sender_dies
        self.orders: list[list[Order]] = []
        self.stale: dict[int, str] = {}
        self.waited = 0.0
        self.senders_fail = False
        self.restarts = [0, 0]
        self.facts = FACTS
        self.adopted: tuple[str, ...] = ()

    @property
    def group(self) -> Ends:
        return self

    async def states(self, wait_s: float = 0.0) -> list[EngineState]:
        self.waited += wait_s
        if wait_s:
            self.state_names = ["up" if name == "starting" else name for name in self.state_names]
        named = enumerate(self.state_names)
        return [
            EngineState(f"engine-{n}", name, self.restarts[n], "" if name == "up" else "it died")
            for n, name in named
        ]

    def quarantine(self, stale: dict[int, str]) -> None:
        self.stale = dict(stale)

    def sender_says(self, status: str) -> tuple[str, str]:
        return (
            ("served", "")
            if status == "served" and not self.senders_fail
            else ("stale", "trainer rank 1: gone")
        )

    def call(
        self, method: Any, *args: Any, timeout: float | None = None, only: Any = None
    ) -> Awaitable[Any]:
        if method.__name__ == "send_weights":
            return Answer(lambda: self.sent(args[0]))
        result = self.ran(method, *args, only=only)
        return Answer(lambda: result)

    def sent(self, orders: Sequence[Order]) -> list[list[Outcome]]:
        if self.sender_dies:
            raise WorkerError("the worker process died", role="actor", rank=1)
        statuses = self.statuses[len(self.orders) - 1]
        return [
            [
                Outcome(o.engine, o.number, *self.sender_says(statuses[o.number]), rank=1)
                for o in orders
            ]
        ]

    def ran(self, method: Any, *args: Any, only: Any) -> Any:
        if method.__name__ == "device_kind":
            return self.kind
        if method.__name__ == "open_sync_store":
            return "127.0.0.1", 5
        if method.__name__ == "describe_weights":
            return [EngineLayout(f"engine-{n}", ("l",)) for n in range(2)]
        if method.__name__ == "plan_weights":
            return [self.facts, None]
        if method.__name__ == "adopt_plan":
            self.adopted = args
            return None
        orders: list[Order] = args[0]
        assert list(only) == [order.number for order in orders]
        statuses = self.statuses[len(self.orders)]
        self.orders.append(orders)
        for number, status in statuses.items():
            if status == "lost":
                self.state_names[number] = "starting"
        reasons = {
            n: "" if status == "served" else f"engine-{n} rank {n}: bucket 3 is broken"
            for n, status in statuses.items()
        }
        return [
            Outcome(
                o.engine,
                o.number,
                statuses[o.number],
                reasons[o.number],
                100 * (statuses[o.number] == "served"),
            )
            for o in orders
        ]


def sync_of(ends: Ends, **settings: Any) -> SliceSync:
    config = RunConfig(rollout=RolloutConfig(num_engines=2, sync=SyncConfig(**settings)))
    anything: Any = ends
    sync = SliceSync(anything, anything, config)
    assert "proven: 10 slices" in block_on(sync.prepare())
    return sync


def test_all_well() -> None:
    ends = Ends([{0: "served", 1: "served"}] * 2)
    sync = sync_of(ends)
    report = block_on(sync.sync(3))
    assert (report.version, report.nbytes, report.stale) == (3, 200, {})
    assert report.metrics()["sync/engines_stale"] == 0.0 and report.metrics()["sync/bytes"] == 200.0
    block_on(sync.sync(4))
    first, second = ends.orders
    assert [order.endpoint.senders for order in first] == [(0, 1), (1,)]
    assert [order.endpoint.receivers for order in first] == [(0,), (1, 2)]
    assert [order.endpoint.message_bytes for order in first] == [50, 60]
    assert [order.endpoint.slots for order in first] == [8, 8]
    assert [order.endpoint.transport for order in first] == ["tcp"] * 2
    # sessions last
    assert [order.endpoint.session for order in first] == [
        order.endpoint.session for order in second
    ]
    assert (
        first[0].attempt != second[0].attempt
        and second[0].version == 4
        and first[0].plan == FACTS.digest
    )


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"staging_bytes": 600}, [6, 5]),  # half for each engine
        ({"staging_bytes": 8}, [2, 2]),
        ({"transport": "shared_memory", "commit": "in_place"}, [8, 8]),
        ({"transport": "shared_memory"}, [3, 4]),  # everything is staged in what both sides see
    ],
)
def test_as_many_messages_are_under_way_as_the_memory_takes(
    settings: dict[str, Any], slots: list[int]
) -> None:
    ends = Ends([{0: "served", 1: "served"}])
    block_on(sync_of(ends, **settings).sync(1))
    assert [order.endpoint.slots for order in ends.orders[0]] == slots


@pytest.mark.parametrize(("pool", "transport"), [("actor", "cuda_ipc"), (None, "p2p")])
def test_the_placement_chooses_the_transport_between_gpus(pool: Any, transport: str) -> None:
    ends: Any = Ends([{0: "served", 1: "served"}])
    ends.kind = "cuda"
    sync = SliceSync(ends, ends, RunConfig(rollout=RolloutConfig(num_engines=2, pool=pool)))
    block_on(sync.prepare())
    block_on(sync.sync(1))
    assert [order.endpoint.transport for order in ends.orders[0]] == [transport] * 2
    assert not ends.orders[0][0].staged


def test_only_the_failed_engine_is_tried_again_in_a_new_session() -> None:
    ends = Ends([{0: "served", 1: "stale"}, {1: "served"}])
    report = block_on(sync_of(ends, max_retries=2).sync(1))
    assert report.stale == {} and ends.stale == {}
    assert [[order.number for order in orders] for orders in ends.orders] == [[0, 1], [1]]
    assert ends.orders[0][1].endpoint.session != ends.orders[1][0].endpoint.session


def test_a_failed_engine_is_left_out_and_asked_again_next_time() -> None:
    ends = Ends([{0: "served", 1: "stale"}, {1: "stale"}, {0: "served", 1: "served"}])
    sync = sync_of(ends, max_retries=1)
    report = block_on(sync.sync(1))
    assert set(report.stale) == {"engine-1"} and set(ends.stale) == {1}
    assert (
        "bucket 3 is broken" in report.stale["engine-1"]
        and "trainer rank 1: gone" in report.stale["engine-1"]
    )
    assert block_on(sync.sync(2)).stale == {} and ends.stale == {}


@pytest.mark.parametrize("status", ["lost", "refused"])
def test_what_a_retry_cannot_heal_is_not_retried(status: str) -> None:
    ends = Ends([{0: "served", 1: status}])
    assert set(block_on(sync_of(ends, max_retries=3).sync(1)).stale) == {"engine-1"}
    assert len(ends.orders) == 1


def test_an_engine_that_is_being_started_is_left_alone() -> None:
    ends = Ends([{0: "served"}], states=("up", "starting"))
    report = block_on(sync_of(ends).sync(1))
    assert report.stale == {"engine-1": "engine-1 is starting: it died"} and ends.waited == 0


def test_an_engine_that_was_started_again_gets_a_new_session() -> None:
    ends = Ends([{0: "served", 1: "served"}] * 2)
    sync = sync_of(ends)
    block_on(sync.sync(1))
    ends.restarts[1] = 1  # died and came back between the syncs: nothing failed
    block_on(sync.sync(2))
    first, second = ([order.endpoint.session for order in orders] for orders in ends.orders)
    assert first[0] == second[0] and first[1] != second[1]


def plans(ends: Ends) -> list[list[str]]:
    return [[order.plan[0] for order in orders] for orders in ends.orders]


def test_an_engine_gets_adapters_alone_once_it_has_the_weights() -> None:
    ends = Ends([{0: "served", 1: "served"}] * 4)
    ends.facts = replace(FACTS, adapters=ALONE)
    sync = sync_of(ends)
    assert ends.adopted == (FACTS.digest, ALONE.digest)
    for version in (1, 2, 3):
        block_on(sync.sync(version))
    ends.restarts[1] = 1
    block_on(sync.sync(4))
    assert plans(ends) == [["d", "d"], ["a", "a"], ["a", "a"], ["a", "d"]]
    second = ends.orders[1]
    assert [order.endpoint.senders for order in second] == [(0,), (1,)]
    assert [order.endpoint.message_bytes for order in second] == [2, 3]
    # a session carries the messages of one plan, as long as the plan stays
    sessions = [[order.endpoint.session for order in orders] for orders in ends.orders]
    assert sessions[0][0] != sessions[1][0] == sessions[2][0] == sessions[3][0]
    assert len({sessions[0][1], sessions[1][1], sessions[3][1]}) == 3


def test_an_engine_that_did_not_get_the_weights_is_sent_them_again() -> None:
    well = {0: "served", 1: "served"}
    ends = Ends([{0: "served", 1: "stale"}, well, {0: "stale", 1: "served"}, well])
    ends.facts = replace(FACTS, adapters=ALONE)
    sync = sync_of(ends, max_retries=0)
    for version in (1, 2, 3, 4):
        block_on(sync.sync(version))
    # adapters that did not arrive left the weights as they were
    assert plans(ends) == [["d", "d"], ["a", "d"], ["a", "a"], ["a", "a"]]


def test_without_any_engine_the_sync_waits_for_one_to_start() -> None:
    ends = Ends([{0: "served"}], states=("starting", "failed"))
    assert set(block_on(sync_of(ends).sync(1)).stale) == {"engine-1"} and ends.waited > 0


def test_engines_lost_in_the_sync_are_waited_for_when_there_is_no_other() -> None:
    ends = Ends([{0: "lost", 1: "lost"}, {0: "served", 1: "served"}])
    assert block_on(sync_of(ends).sync(1)).stale == {} and ends.waited > 0


def test_a_sender_that_fails_after_its_last_message_costs_the_session_alone() -> None:
    ends = Ends([{0: "served", 1: "served"}] * 2)
    ends.senders_fail = True
    sync = sync_of(ends)
    assert block_on(sync.sync(1)).stale == {}
    block_on(sync.sync(2))
    assert {order.endpoint.session for order in ends.orders[0]}.isdisjoint(
        order.endpoint.session for order in ends.orders[1]
    )


def test_no_engine_at_all_names_every_reason() -> None:
    ends = Ends([{0: "refused", 1: "refused"}])
    with pytest.raises(
        WeightSyncError,
        match=r"no engine received it\n  - engine-0 rank 0: .*\n  - engine-1 rank 1: ",
    ):
        block_on(sync_of(ends).sync(1))
    assert set(ends.stale) == {0, 1}


def test_a_dead_trainer_rank_is_its_own_error_and_its_victims_get_no_requests() -> None:
    ends = Ends([{0: "served", 1: "stale"}], sender_dies=True)
    with pytest.raises(WorkerError, match="actor rank 1"):
        block_on(sync_of(ends).sync(1))
    assert set(ends.stale) == {1}


@pytest.mark.parametrize(
    ("kind", "commit", "transport", "staged"),
    [("cpu", None, "tcp", True), ("cuda", None, "p2p", False), ("cuda", "staged", "p2p", True)],
)
def test_what_carries_weights_and_where_they_wait_follows_from_the_ranks_devices(
    kind: str, commit: str | None, transport: str, staged: bool
) -> None:
    ends = Ends([{0: "served", 1: "served"}])
    ends.kind = kind
    block_on(sync_of(ends, commit=commit).sync(1))
    assert {(order.endpoint.transport, order.staged) for order in ends.orders[0]} == {
        (transport, staged)
    }
