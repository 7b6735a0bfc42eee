"""Log-probs and entropy over the sampler's support against a float64 softmax over its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms import vocab_parallel
from hybridflow.algorithms.vocab_parallel import Scoring, Support, log_probs_and_entropy
from hybridflow.batch import DataProto, Jagged, Supports, support_columns
from hybridflow.data.packing import check_token_ids, supports_of
from tests.unit.algorithms.tensor_ranks import HIDDEN, PADDED, VOCAB, Ranks

ROWS = 29
TEMPERATURE = 0.7


def case(seed: int, with_whole: bool) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, Supports]:
    """Hidden states, weight, targets and supports of 1 to 12 tokens; with `with_whole` some rows
    have none."""
    draw = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    sets = [draw.choice(VOCAB, draw.integers(1, 13), replace=False) for _ in range(ROWS)]
    targets = np.array([draw.choice(one) for one in sets])
    if with_whole:
        sets = [one[:0] if draw.random() < 0.3 else one for one in sets]
    sizes = np.array([len(one) for one in sets], np.int32)
    return hidden, weight, targets, Supports(sizes, np.concatenate(sets).astype(np.int32))


def expected(
    hidden: torch.Tensor, weight: torch.Tensor, targets: np.ndarray, supports: Supports
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies; every token is looked at alone."""
    log_probs = []
    entropies = []
    for row, ids in enumerate(np.split(supports.ids, np.cumsum(supports.sizes))[:-1]):
        among = sorted(ids.tolist()) if len(ids) else list(range(VOCAB))
        spread = torch.log_softmax(weight[among] @ hidden[row] / TEMPERATURE, 0)
        log_probs.append(spread[among.index(int(targets[row]))])
        entropies.append(torch.distributions.Categorical(logits=spread).entropy())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("with_whole", [False, True])
def test_values_and_gradients_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int, with_whole: bool
) -> None:
    """Where all rows have a support nothing but its logits is computed, in float64; the pass over
    the whole vocabulary computes in float32."""
    ranks = Ranks(world)
    monkeypatch.setattr(vocab_parallel, "dist", ranks)
    hidden, weight, targets, supports = case(world, with_whole)
    support = Support.of(supports, targets, lambda one: one)
    upstream = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = -(-PADDED // world)

    def score(rank: int) -> list[torch.Tensor]:
        kind = torch.float32 if with_whole else torch.float64
        leaves = [
            one.clone().to(kind).requires_grad_()
            for one in (hidden, weight[rank * rows : (rank + 1) * rows])
        ]
        scoring = Scoring(VOCAB, TEMPERATURE, True, 3)
        found = log_probs_and_entropy(*leaves, torch.from_numpy(targets), scoring, ranks, support)
        loss = sum((value * up).sum() for value, up in zip(found, upstream, strict=True))
        return [*(value.detach() for value in found), *torch.autograd.grad(loss, leaves)]

    exact = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    wanted = expected(*exact, targets, supports)
    loss = sum((value * up).sum() for value, up in zip(wanted, upstream, strict=True))
    gradients = torch.autograd.grad(loss, exact)
    near: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-5} if with_whole else {"rtol": 1e-12, "atol": 1e-12}
    )
    found = ranks.run(score)
    for one in found:
        for ours, theirs in zip(one, wanted, strict=False):
            torch.testing.assert_close(ours.double(), theirs.detach(), **near)
    torch.testing.assert_close(sum(one[2] for one in found).double(), gradients[0], **near)
    torch.testing.assert_close(torch.cat([one[3] for one in found]).double(), gradients[1], **near)


def test_the_whole_vocabulary_as_support_is_no_support(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(1)
    monkeypatch.setattr(vocab_parallel, "dist", ranks)
    hidden, weight, targets, _ = case(3, False)
    everything = Supports(
        np.full(ROWS, VOCAB, np.int32), np.tile(np.arange(VOCAB, dtype=np.int32), ROWS)
    )
    support = Support.of(everything, targets, lambda one: one)
    scoring = Scoring(VOCAB, TEMPERATURE, True)

    def score(_: int) -> list[Any]:
        given = hidden.float(), weight.float(), torch.from_numpy(targets), scoring, ranks
        return [log_probs_and_entropy(*given, support), log_probs_and_entropy(*given)]

    [[ours, theirs]] = ranks.run(score)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ids", "times"), [([1, 2], 0), ([5, 5], 2)])
def test_a_target_outside_of_its_support_is_refused(ids: list[int], times: int) -> None:
    supports = Supports(np.array([1, 0, 2], np.int32), np.array([4, *ids], np.int32))
    with pytest.raises(
        ValueError, match=f"target 2 is 5, which occurs {times} times among the 2 tokens"
    ):
        Support.of(supports, np.array([4, 9, 5]), lambda one: one)


def batch_of(rows: list[list[list[int]]]) -> DataProto:
    """Responses whose tokens are the first of their supports."""
    parts = [
        Supports(
            np.array(list(map(len, row)), np.int32),
            np.array([i for one in row for i in one], np.int32),
        )
        for row in rows
    ]
    responses = Jagged.from_rows([[one[0] if one else 0 for one in row] for row in rows], np.int64)
    prompts = Jagged.from_rows([[1]] * len(rows), np.int64)
    return DataProto.from_columns(
        {"prompt_ids": prompts, "response_ids": responses, **support_columns(parts)}
    )


def test_supports_follow_the_tokens_that_take_part() -> None:
    batch = batch_of([[[3, 4], [], [5]], [], [[6, 7, 8], [9, 2]]])
    found = supports_of(batch, np.array([2, 0, 1]), np.array([True, False, False, True, True]))
    assert found is not None
    assert found.sizes.tolist() == [3, 0, 1] and found.ids.tolist() == [6, 7, 8, 5]
    assert supports_of(batch.drop(["support_ids"]), np.array([0]), slice(None)) is None


def test_sizes_and_ids_that_disagree_are_refused_with_their_row() -> None:
    batch = batch_of([[[3, 7]], [[5]]])
    short = batch.with_columns(support_ids=Jagged.from_rows([[3, 7], []], np.int32))
    with pytest.raises(
        ValueError, match="row 1: support_ids has 0 tokens, but support_sizes sums to 1"
    ):
        supports_of(short, np.array([0, 1]), slice(None))
    with pytest.raises(ValueError, match="support_ids contains token 7"):
        check_token_ids(batch, 6)
