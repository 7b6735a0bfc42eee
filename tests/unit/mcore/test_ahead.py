"""The inputs and targets of prediction heads in packed rows, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.data.packing import RESPONSE_MASK

DEPTHS = 3


def random_batch(seed: int, masked: bool) -> DataProto:
    """Rows of different lengths, also empty responses; every token occurs only once."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 5, 7), rng.integers(0, 9, 7)
    tokens = rng.permutation(np.arange(1, 1 + prompts.sum() + responses.sum()))
    columns = {
        "prompt_ids": Jagged.from_lengths(tokens[: prompts.sum()], prompts),
        "response_ids": Jagged.from_lengths(tokens[prompts.sum() :], responses),
    }
    if masked:
        mask = rng.random(responses.sum()) < 0.7
        columns[RESPONSE_MASK] = Jagged.from_lengths(mask, responses)
    return DataProto.from_columns(columns)


def pairs_by_hand(batch: DataProto, depth: int) -> set[tuple[int, ...]]:
    """(token, the tokens after it that the heads read, the target) of every prediction."""
    found = set()
    for row in range(len(batch)):
        prompt = batch.jagged("prompt_ids").row(row).tolist()
        response = batch.jagged("response_ids").row(row).tolist()
        mask = [True] * len(response)
        if RESPONSE_MASK in batch:
            mask = batch.jagged(RESPONSE_MASK).row(row).tolist()
        tokens = prompt + response
        for first in range(len(response) - depth):
            if all(mask[first : first + depth + 1]):
                state = len(prompt) + first - 1
                found.add(tuple(tokens[state : state + depth + 2]))
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_head_reads_and_predicts_the_tokens_after_its_own(size: int, masked: bool) -> None:
    from hybridflow.mcore.packed import Cut, build_micro_batches

    for seed in range(20):
        batch = random_batch(seed, masked)
        found: list[set[tuple[int, ...]]] = [set() for _ in range(DEPTHS)]
        count = [0] * DEPTHS
        for rank in range(size):
            cut = Cut(2 * size if size > 1 else 1, 1, rank, size)
            [micro] = build_micro_batches(
                batch, [np.arange(7)], (RESPONSE_MASK,), cut, heads=DEPTHS
            )
            inputs = [micro.tokens[0], *(ahead.tokens[0] for ahead in micro.ahead)]
            for depth, ahead in enumerate(micro.ahead, 1):
                read = [tokens[ahead.rows].tolist() for tokens in inputs[: depth + 1]]
                found[depth - 1] |= set(zip(*read, ahead.targets.tolist(), strict=True))
                count[depth - 1] += len(ahead.targets)
        for depth in range(1, DEPTHS + 1):
            expected = pairs_by_hand(batch, depth)
            assert found[depth - 1] == expected
            assert count[depth - 1] == len(expected)


def test_no_head_reads_the_next_row() -> None:
    from hybridflow.mcore.packed import Cut, build_micro_batches

    batch = random_batch(3, masked=False)
    [micro] = build_micro_batches(batch, [np.arange(7)], (), Cut(), heads=DEPTHS)
    row_of: dict[int, Any] = {
        int(token): row
        for row in range(len(batch))
        for name in ("prompt_ids", "response_ids")
        for token in batch.jagged(name).row(row)
    }
    for ahead in micro.ahead:
        for here, later in zip(micro.tokens[0].tolist(), ahead.tokens[0].tolist(), strict=True):
            assert not later or row_of[here] == row_of[later]
