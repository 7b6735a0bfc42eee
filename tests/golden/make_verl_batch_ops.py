"""Writes `verl_batch_ops.json`: what verl 0.9.1 answers for batch operations and dispatch on the
cases that it and we define alike.

Needs the peer: `make bench NAME=gae` installs it beside the benchmarks. Run as
`PYTHONPATH=benchmarks/.cache/peer python tests/golden/make_verl_batch_ops.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import decorator

OUT = Path(__file__).with_name("verl_batch_ops.json")


def batch(rows: int, start: int = 0) -> Any:
    """`rows` rows of an integer, a matrix and a string column."""
    ids = torch.arange(start, start + rows)
    values = torch.arange(start * 3, (start + rows) * 3, dtype=torch.float32).view(rows, 3) / 7
    text = np.array([f"t{i}" for i in range(start, start + rows)], dtype=object)
    return DataProto.from_dict({"ids": ids, "values": values}, {"text": text}, {"temperature": 0.5})


def plain(data: Any) -> dict[str, Any]:
    """A batch as lists."""
    tensors = {name: tensor.tolist() for name, tensor in data.batch.items()}
    return {
        "columns": tensors
        | {name: array.tolist() for name, array in data.non_tensor_batch.items()},
        "meta": data.meta_info,
    }


def row_operations() -> list[dict[str, Any]]:
    """Operations on one batch."""
    cases = []
    for rows in (1, 5, 8):
        order = np.random.default_rng(rows).permutation(rows).tolist()
        mask = [i % 3 != 1 for i in range(rows)]
        cases += [
            {
                "op": "select",
                "rows": rows,
                "args": [["ids", "text"]],
                "out": plain(batch(rows).select(["ids"], ["text"])),
            },
            {
                "op": "rows_list",
                "rows": rows,
                "args": [order],
                "out": plain(batch(rows).select_idxs(order)),
            },
            {
                "op": "rows_repeated",
                "rows": rows,
                "args": [[0, 0, rows - 1]],
                "out": plain(batch(rows).select_idxs([0, 0, rows - 1])),
            },
            {
                "op": "rows_mask",
                "rows": rows,
                "args": [mask],
                "out": plain(batch(rows).select_idxs(np.array(mask))),
            },
            {
                "op": "slice",
                "rows": rows,
                "args": [0, rows // 2 + 1],
                "out": plain(batch(rows)[0 : rows // 2 + 1]),
            },
            {
                "op": "slice_step",
                "rows": rows,
                "args": [0, rows, 2],
                "out": plain(batch(rows)[0:rows:2]),
            },
            {
                "op": "repeat",
                "rows": rows,
                "args": [3],
                "out": plain(batch(rows).repeat(3, interleave=True)),
            },
            {
                "op": "rename",
                "rows": rows,
                "args": [{"ids": "uid"}],
                "out": plain(batch(rows).rename("ids", "uid")),
            },
            {
                "op": "split",
                "rows": rows,
                "args": [2],
                "out": [plain(part) for part in batch(rows).split(2)],
            },
        ]
        reordered = batch(rows)
        reordered.reorder(torch.tensor(order))
        cases.append({"op": "reorder", "rows": rows, "args": [order], "out": plain(reordered)})
        for divisor in (1, 3, 4):
            padded, size = pad_dataproto_to_divisor(batch(rows), divisor)
            cases.append(
                {"op": "pad", "rows": rows, "args": [divisor], "out": plain(padded), "size": size}
            )
            cases.append(
                {
                    "op": "unpad",
                    "rows": rows,
                    "args": [divisor],
                    "out": plain(unpad_dataproto(padded, size)),
                }
            )
        for chunks in (1, rows):
            cases.append(
                {
                    "op": "chunk",
                    "rows": rows,
                    "args": [chunks],
                    "out": [plain(part) for part in batch(rows).chunk(chunks)],
                }
            )
        cases.append(
            {
                "op": "concat",
                "rows": rows,
                "args": [3],
                "out": plain(DataProto.concat([batch(rows), batch(3, rows)])),
            }
        )
        cases.append(
            {
                "op": "union",
                "rows": rows,
                "args": [],
                "out": plain(batch(rows).union(batch(rows).rename("ids", "uid"))),
            }
        )
        cases.append({"op": "union_error", "rows": rows, "args": [], "out": refuses_union(rows)})
    return cases


def refuses_union(rows: int) -> bool:
    """Whether a column with other values is refused."""
    try:
        batch(rows).union(batch(rows, start=1))
    except (AssertionError, ValueError):
        return True
    return False


def dispatched() -> list[dict[str, Any]]:
    """What each rank of an N-d mesh gets, and what is collected from ranks that return what they
    got."""
    cases = []
    for dp_ranks, collects, rows in (
        ([0, 1], [True, True], 6),
        ([0, 0, 1, 1], [False, True, False, True], 8),
        ([0, 1, 0, 1, 0, 1], [True, True, False, False, False, False], 4),
    ):
        dp_size = max(dp_ranks) + 1
        (chunks,), _ = decorator._split_args_kwargs_data_proto(dp_size, batch(rows))
        by_rank = [chunks[dp] for dp in dp_ranks]
        # Ours collects in dp order; verl in rank order. They agree where the collecting ranks
        # ascend with their groups, as here.
        collected = DataProto.concat(
            [part for part, wanted in zip(by_rank, collects, strict=True) if wanted]
        )
        cases.append(
            {
                "rows": rows,
                "dp_ranks": dp_ranks,
                "collects": collects,
                "by_rank": [plain(part) for part in by_rank],
                "collected": plain(collected),
            }
        )
    return cases


def padded_dispatch() -> list[dict[str, Any]]:
    """Batches that do not divide: padded for the ranks, undone on collect."""
    cases = []
    for rows, ranks in ((5, 2), (7, 4), (8, 3)):
        data = batch(rows)
        data.meta_info["_verl_auto_padding"] = True
        (chunks,), kwargs = decorator._split_args_kwargs_data_proto_with_auto_padding(ranks, data)
        padding = kwargs.get(decorator._padding_size_key, 0)
        sizes = [len(part) for part in chunks]
        whole = DataProto.concat(chunks)
        back = whole.select_idxs(list(range(len(whole) - padding)))
        cases.append(
            {
                "rows": rows,
                "ranks": ranks,
                "sizes": sizes,
                "padding": padding,
                "ids": back.batch["ids"].tolist(),
            }
        )
    return cases


if __name__ == "__main__":
    golden = {
        "peer": "verl 0.9.1",
        "operations": row_operations(),
        "dispatch": dispatched(),
        "padded_dispatch": padded_dispatch(),
    }
    OUT.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
