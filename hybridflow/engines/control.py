"""What an engine's worker says to our code inside the engine's ranks. Each kind of engine has a way
of its own to bring the message there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hybridflow.sync.session import Order

DESCRIBE = "describe"
RECEIVE = "receive"
PauseMode = Literal["abort", "retract", "in_place"]  # what happens to requests under way


@dataclass(frozen=True)
class Control:
    """What the engine's ranks are to do.

    Attributes:
        action: DESCRIBE or RECEIVE.
        host, port: of the sync's store. timeout_s: bounds each wait.
        report: prefix of the keys under which the ranks report.
        first_rank: number in the plan of the engine's first rank. ranks: how many it has.
        order: what to receive.
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
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Control:
        """The inverse of `to_json`."""
        # needs torch, which clients of an engine do without
        from hybridflow.sync.session import Order

        data: Mapping[str, Any] = json.loads(text)
        return cls(**{**data, "order": Order.from_dict(data["order"]) if data["order"] else None})
