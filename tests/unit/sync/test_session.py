"""What both ends of a sync tell each other over a real store, and the schedules cut from a plan."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from hybridflow.errors import WeightSyncError
from hybridflow.models.layout import ParallelShape
from hybridflow.process.rendezvous import master_store
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.engine_layouts import engine_layout as by_hand
from hybridflow.reshard.layout import Catalog, Layout, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.sync import session
from hybridflow.sync.messages import Messages
from hybridflow.sync.schedule import (
    RECEIVER,
    SENDER,
    EngineLayout,
    Schedule,
    layout_digest,
    make_weight_plan,
    post_layout,
    schedule_key,
)
from hybridflow.sync.session import (
    ABORT,
    COMMIT,
    RECEIVE,
    Announcement,
    Board,
    Control,
    Order,
    RankReport,
)
from hybridflow.sync.transports.base import Endpoint
from tests.unit.reshard.reshard_cases import decoder_of

HOST = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[Any]:
    yield master_store(HOST, 0, 5.0)


def order_at(store: Any, attempt: int = 1, timeout_s: float = 0.3) -> Order:
    endpoint = Endpoint("p2p", "engine-0.0", HOST, store.port, (0, 3), (4, 5), 1000, timeout_s)
    return Order("engine-0", 0, endpoint, attempt, 7, "p" * 64)


def boards(store: Any, count: int, **order: int) -> list[Board]:
    return [Board.open(order_at(store, **order)) for _ in range(count)]


def test_orders_and_control_messages_survive_json(store: Any) -> None:
    order = order_at(store)
    assert Order.from_dict(json.loads(json.dumps(asdict(order)))) == order
    control = Control(RECEIVE, HOST, 1, 2.0, "done", 4, 2, order)
    assert Control.from_json(control.to_json()) == control


def test_whoever_asks_first_decides_for_all(store: Any) -> None:
    first, second, third = boards(store, 3)
    assert third.decision() == ""
    assert first.decide(COMMIT) == COMMIT
    assert second.decide(ABORT) == COMMIT  # too late: the others may be copying already
    assert third.decision() == COMMIT


def test_once_called_off_nobody_commits_and_senders_stop_waiting(store: Any) -> None:
    worker, rank, sender = boards(store, 3)
    worker.call_off("the engine is gone")
    assert rank.decide(COMMIT) == ABORT
    with pytest.raises(
        WeightSyncError, match=r"weight version 7 to engine-0.*cancelled: the engine is gone"
    ):
        sender.wait_for_go(5.0)


def test_go_releases_a_waiting_sender(store: Any) -> None:
    worker, sender = boards(store, 2)
    went: list[bool] = []

    def go() -> None:
        went.append(True)
        worker.go()

    threading.Timer(0.2, go).start()
    sender.wait_for_go(60.0)
    assert went


def test_silent_ranks_are_named_with_the_deadline(store: Any) -> None:
    sender, worker, rank = boards(store, 3)
    sender.announce(0, Announcement("p" * 64, 7))
    with pytest.raises(WeightSyncError, match=r"no announcement from trainer rank 3 after 0\.3 s"):
        worker.announcements(0.3)
    sender.announce(3, Announcement("q" * 64, 6))
    assert worker.announcements(0.3) == {0: Announcement("p" * 64, 7), 3: Announcement("q" * 64, 6)}
    rank.staged(4)
    with pytest.raises(WeightSyncError, match=r"weights not fully received by rank 5 after 0\.3 s"):
        rank.wait_all_staged(0.3)
    with pytest.raises(WeightSyncError, match="no go-ahead from the engine worker"):
        sender.wait_for_go(0.2)


def test_a_missing_report_is_missing(store: Any) -> None:
    (board,) = boards(store, 1)
    session.write_report(
        board.store, board.report_prefix, RankReport(5, "rank 5: no", 10, 0.5, "d", 1)
    )
    assert board.reports(0.2) == {5: RankReport(5, "rank 5: no", 10, 0.5, "d", 1)}


def test_attempts_do_not_meet(store: Any) -> None:
    (first,) = boards(store, 1, attempt=1)
    (second,) = boards(store, 1, attempt=2)
    first.call_off("broken")
    second.go()
    second.wait_for_go(1.0)
    assert second.decide(COMMIT) == COMMIT
    second.clear()
    assert second.decision() == ""


def test_a_store_that_is_gone_is_our_error() -> None:
    with pytest.raises(WeightSyncError, match=r"could not reach .* at 127\.0\.0\.1:1"):
        session.connect(HOST, 1, 0.3)


# ---- schedules

TRAINER = ParallelShape(4, tensor=2, pipeline=2, expert=2)
ENGINES = (EngineShape(), EngineShape(tensor=2))


def posted(store: Any, target: Layout) -> list[EngineLayout]:
    """As engines describe themselves: each rank posts its layout and the shapes of its
    parameters."""
    engines: list[list[str]] = [[], []]
    for rank, number in enumerate(target.rank_class.tolist()):
        layout = target.classes[number]
        parameters = dict(zip(layout.names, layout.shapes.tolist(), strict=True))
        engines[int(target.replica[rank])].append(post_layout(store, layout, parameters))
    return [
        EngineLayout(f"engine-{number}", tuple(digests)) for number, digests in enumerate(engines)
    ]


def test_every_rank_reads_exactly_its_own_messages(store: Any) -> None:
    decoder = decoder_of("qwen3_moe")
    catalog = Catalog.of(decoder.tensors())
    target = by_hand(decoder, ENGINES, "float32")
    facts = make_weight_plan(
        store,
        decoder,
        megatron_layout(decoder, TRAINER.coordinates(), "float32"),
        posted(store, target),
        1 << 20,
        1.0,
    )
    plan = make_plan(
        catalog, megatron_layout(decoder, TRAINER.coordinates(), "float32"), target, (1 << 20) // 2
    )
    assert (
        facts.digest == plan.digest() and facts.receivers == ((0,), (1, 2)) and facts.unused == ()
    )
    messages = Messages(plan)
    sent = [0, 0]
    for rank in range(4):
        read = Schedule.from_dict(
            session.read(store, schedule_key(facts.digest, SENDER, rank), 1.0)
        )
        assert list(read.messages) == messages.outgoing(rank) and read.plan == facts.digest
        for message in read.messages:
            sent[message.peer > 0] += message.nbytes
            assert rank in facts.senders[message.peer > 0]
    assert tuple(sent) == facts.nbytes
    for rank in range(3):
        read = Schedule.from_dict(
            session.read(store, schedule_key(facts.digest, RECEIVER, rank), 1.0)
        )
        assert list(read.messages) == messages.incoming(rank)
        assert layout_digest(read.layout) == layout_digest(
            target.classes[int(target.rank_class[rank])]
        )
    assert facts.digest[:12] in facts.describe() and "to 2 engines" in facts.describe()


def test_a_parameter_that_the_loader_does_not_fill_is_refused(store: Any) -> None:
    decoder = decoder_of("qwen3")
    target = by_hand(decoder, (EngineShape(),), "float32")
    layout = target.classes[0]
    parameters = {
        **dict(zip(layout.names, layout.shapes.tolist(), strict=True)),
        "model.extra.weight": [4],
    }
    engines = [EngineLayout("engine-0", (post_layout(store, layout, parameters),))]
    with pytest.raises(WeightSyncError, match=r"engine-0 rank 0: .*extra \['model.extra.weight'\]"):
        make_weight_plan(
            store,
            decoder,
            megatron_layout(decoder, ParallelShape(1).coordinates(), "float32"),
            engines,
            1 << 20,
            1.0,
        )


def test_too_little_staging_names_the_key(store: Any) -> None:
    decoder = decoder_of("qwen3_moe")
    engines = posted(store, by_hand(decoder, ENGINES, "float32"))
    with pytest.raises(WeightSyncError, match=r"rollout.sync.staging_bytes=4096 / 2 engines"):
        make_weight_plan(
            store,
            decoder,
            megatron_layout(decoder, TRAINER.coordinates(), "float32"),
            engines,
            4096,
            1.0,
        )
