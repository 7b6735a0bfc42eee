"""The same batch for both sides: eight dense token columns, 64 bytes a token."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged

INTEGERS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "labels")
FLOATS = ("old_log_probs", "advantages")  # float64 keeps all columns of one width
COLUMNS = INTEGERS + FLOATS
BYTES_A_TOKEN = 8 * len(COLUMNS)


def arrays(total_bytes: int, rows: int) -> dict[str, np.ndarray]:
    """Columns [rows, total_bytes / rows / 64]."""
    tokens = total_bytes // (rows * BYTES_A_TOKEN)
    random = np.random.default_rng(0)
    made = {name: random.integers(0, 50_000, (rows, tokens)) for name in INTEGERS}
    return made | {name: random.random((rows, tokens)) for name in FLOATS}


def ours(columns: dict[str, np.ndarray]) -> DataProto:
    """Dense columns, over the same memory."""
    return DataProto.from_columns(columns)


def ours_jagged(columns: dict[str, np.ndarray]) -> DataProto:
    """The same tokens as rows of different lengths (the lengths are drawn; the total is that of the dense batch)."""
    rows, tokens = next(iter(columns.values())).shape
    cuts = np.sort(np.random.default_rng(1).integers(0, rows * tokens, rows - 1))
    offsets = np.concatenate([[0], cuts, [rows * tokens]])
    return DataProto.from_columns({name: Jagged(values.reshape(-1), offsets) for name, values in columns.items()})


def theirs(columns: dict[str, np.ndarray]) -> Any:
    """verl's DataProto over the same memory."""
    import torch
    from verl.protocol import DataProto as Peer

    return Peer.from_dict({name: torch.from_numpy(values) for name, values in columns.items()})
