"""The zigzag layout against Megatron's rotary embedding, which takes it for granted; what
micro-batches look like under it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.algorithms.losses import describe_nonfinite
from hybridflow.batch import DataProto, Jagged
from hybridflow.mcore import bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.packed import Cut, build_micro_batches
from hybridflow.mcore.parallel import ZigZag


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_row_has_one_place_and_positions_are_those_of_megatron(size: int) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    lengths = np.array([3, 1, 5]) * 2 * size
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    layout = ZigZag.of(bounds, size)
    rows = [layout.rows_of(rank) for rank in range(size)]
    assert sorted(np.concatenate(rows)) == list(range(bounds[-1]))
    assert {len(mine) for mine in rows} == {bounds[-1] // size}
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    for rank, mine in enumerate(rows):
        assert (layout.local[mine] == np.arange(len(mine))).all() and (
            layout.owner[mine] == rank
        ).all()
        expected = [
            _get_thd_freqs_on_this_cp_rank(
                rank, size, torch.empty(length // size), torch.arange(lengths.max())
            )
            for length in lengths
        ]
        assert (positions[mine] == torch.cat(expected).numpy()).all()


def test_every_response_token_is_predicted_once_from_the_row_before_it() -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    responses = [[7, 8], [9, 10, 11, 12, 13], [14]]
    batch = DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(prompts, np.int64),
            "response_ids": Jagged.from_rows(responses, np.int64),
        }
    )
    size = 2
    followed = {}
    targets = {}
    for rank in range(size):
        [micro] = build_micro_batches(
            batch, [np.array([2, 0, 1])], (), Cut(2 * size, 6 * size, rank, size)
        )
        assert (
            micro.length == 24
            and micro.tokens.shape == (1, micro.length // size)
            and micro.num_targets == 8
        )
        # 2, 4 and 5 tokens, padded to 4, and the tail
        assert micro.packed.cu_seqlens_q.tolist() == [0, 4, 8, 16, 24]
        assert micro.places is not None
        for row, target, place in zip(
            micro.predict_rows.tolist(), micro.targets.tolist(), micro.places.tolist(), strict=True
        ):
            assert place not in targets
            targets[place], followed[place] = target, int(micro.tokens[0, row])
    assert [targets[place] for place in range(8)] == [14, 7, 8, 9, 10, 11, 12, 13]
    assert [followed[place] for place in range(8)] == [6, 3, 7, 4, 9, 10, 11, 12]


def test_what_is_not_finite_is_described_by_its_likeliest_cause() -> None:
    fine = [-1, -1, -1]
    assert describe_nonfinite([fine, fine]) == ""
    assert "the loss is not finite: rank 1 micro-batch 2" in describe_nonfinite(
        [[-1, 2, 0], [2, 2, 0]]
    )
    assert "a gradient is not finite: rank 0 micro-batch 4" in describe_nonfinite(
        [[-1, 4, 0], [-1, -1, 0]]
    )
    assert "the reduced gradients on rank 1 are not finite" in describe_nonfinite(
        [fine, [-1, -1, 0]]
    )
    assert "and 2 more ranks" in describe_nonfinite([[0, -1, -1]] * 6)
