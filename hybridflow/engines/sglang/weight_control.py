"""How an engine's worker brings a message to our code inside SGLang's ranks: through SGLang's own
update endpoint.

`/update_weights_from_tensor` hands every tensor-parallel rank a list of (name, tensor) and calls
the function that `load_format` names on it (`weight_receiver.load`). The message is JSON in place
of the name; the tensor is one byte that nobody reads.
"""

from __future__ import annotations

import base64
import pickle

from hybridflow.engines.control import Control

LOADER = "hybridflow.engines.sglang.weight_receiver.load"


def payload(control: Control) -> list[str]:
    """`serialized_named_tensors` for SGLang, one entry a rank.

    SGLang takes pickles here and nothing else (sglang/srt/managers/tp_worker.py:194); its endpoint,
    behind the admin key, unpickles them with an allow-list. We only write them.
    """
    import torch

    packed = pickle.dumps([(control.to_json(), torch.zeros(1, dtype=torch.uint8))])
    return [base64.b64encode(packed).decode()] * control.ranks
