"""The message by which an engine's worker calls our code inside SGLang's ranks, through SGLang's own update endpoint.

`/update_weights_from_tensor` hands every tensor-parallel rank a list of (name, tensor) and calls the function that
`load_format` names on it (`weight_receiver.load`). The message is JSON in place of the name; the tensor is one byte
that nobody reads.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.sync.session import Order

LOADER = "hybridflow.engines.sglang.weight_receiver.load"
DESCRIBE, RECEIVE = "describe", "receive"


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
        return json.dumps({**vars(self), "order": self.order.to_dict() if self.order else None})

    @classmethod
    def from_json(cls, text: str) -> Control:
        """The inverse of `to_json`."""
        from hybridflow.sync.session import Order  # needs torch, which clients of an engine do without

        data: Mapping[str, Any] = json.loads(text)
        return cls(**{**data, "order": Order.from_dict(data["order"]) if data["order"] else None})


def payload(control: Control) -> list[str]:
    """`serialized_named_tensors` for SGLang, one entry a rank.

    SGLang takes pickles here and nothing else (sglang/srt/managers/tp_worker.py:194); its endpoint, behind the admin
    key, unpickles them with an allow-list. We only write them.
    """
    import torch

    packed = pickle.dumps([(control.to_json(), torch.zeros(1, dtype=torch.uint8))])
    return [base64.b64encode(packed).decode()] * control.ranks
