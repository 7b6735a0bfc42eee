"""Delivery of messages from an engine's worker to HybridFlow's code inside SGLang's ranks, through
SGLang's own update endpoint.

`/update_weights_from_tensor` passes a list of (name, tensor) to every tensor-parallel rank and
calls the function named by `load_format` on it (`weight_receiver.load`). The name contains the
message as JSON; the tensor is an unused byte.
"""

from __future__ import annotations

import base64
import pickle

from hybridflow.engines.control import Control

LOADER = "hybridflow.engines.sglang.weight_receiver.load"


def payload(control: Control) -> list[str]:
    """Return `serialized_named_tensors` for SGLang, one entry per rank.

    SGLang accepts only pickles here (sglang/srt/managers/tp_worker.py:194). Its endpoint requires
    the admin key and unpickles with an allow-list. HybridFlow only writes these pickles and never
    reads any.
    """
    import torch

    packed = pickle.dumps([(control.to_json(), torch.zeros(1, dtype=torch.uint8))])
    return [base64.b64encode(packed).decode()] * control.ranks
