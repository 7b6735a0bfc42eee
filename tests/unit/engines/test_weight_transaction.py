"""An engine's part of a weight sync while the rank that holds the sync's store is lost."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.engines import weight_transaction
from hybridflow.engines.weight_transaction import receive
from hybridflow.process.store import StoreError
from hybridflow.sync.session import Board, Order, RankReport
from hybridflow.sync.transports.base import Endpoint

CLIENT: Any = None
ORDER = Order(
    "engine-0", 0, Endpoint("tcp", "s", "127.0.0.1", 1, (0,), (0,), 1024, 1.0), 1, 3, "plan"
)


class Lost:
    """A store that was reached, and then no more."""

    def __getattr__(self, _: str) -> Any:
        raise StoreError("the store at 127.0.0.1:1 cannot be reached any more: timed out")


@pytest.fixture(autouse=True)
def with_a_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Any = Lost()
    monkeypatch.setattr(Board, "open", lambda order: Board(lost, order))


def test_weights_that_are_served_stay_so_when_the_store_is_lost_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_transaction, "_compare", lambda *_: None)
    monkeypatch.setattr(weight_transaction, "_transact", lambda *_: {0: RankReport(0, nbytes=7)})
    outcome = receive(CLIENT, ORDER, "plan")
    assert (outcome.status, outcome.nbytes, outcome.error) == ("served", 7, "")


def test_a_store_that_is_lost_on_the_way_is_an_outcome() -> None:
    outcome = receive(CLIENT, ORDER, "plan")
    assert outcome.status == "refused" and "cannot be reached any more" in outcome.error
