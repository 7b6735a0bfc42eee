"""Messages from an engine's worker to HybridFlow's code inside the engine's ranks. How they are
delivered depends on the kind of engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hybridflow.sync.session import Order

DESCRIBE = "describe"
RECEIVE = "receive"
PauseMode = Literal["abort", "retract", "in_place"]  # treatment of requests in flight


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
        # imports torch, which an engine's clients avoid
        from hybridflow.sync.session import Order

        data: Mapping[str, Any] = json.loads(text)
        return cls(**{**data, "order": Order.from_dict(data["order"]) if data["order"] else None})
