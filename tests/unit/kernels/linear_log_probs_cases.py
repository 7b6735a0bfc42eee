"""Run by test_kernels.py in Triton's interpreter: sums over the vocabulary and their gradients
against float64.

Tolerances: with K products summed in fp32 (eps = 2^-24 each, rounding to nearest) a logit of
magnitude x is off by about sqrt(K) eps x; a log-prob near the normaliser's magnitude inherits the
absolute error of its logits. Gradients in a half precision are rounded once more to it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow_kernels import INTERPRETED, linear_log_probs
from hybridflow_kernels.linear_log_probs import Upstream, gradients, partial_sums, tiles_for

EPS = 2.0**-24
HALF_EPS = {torch.float32: EPS, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
TILES = tiles_for(torch.float32, 8)

shapes = st.tuples(
    st.sampled_from([1, TILES.rows - 1, TILES.rows, 2 * TILES.rows + 3]),
    st.sampled_from([1, TILES.columns, TILES.split + 5, 3 * TILES.split - 1]),
    st.sampled_from([1, TILES.depth, 2 * TILES.depth + 3]),
)


def inputs(
    shape: tuple[int, int, int], seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, targets of which about one in five is elsewhere."""
    n, v, h = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator) * scale
    weight = torch.randn(v, h, generator=generator)
    targets = torch.randint(0, v, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < 0.2] = -1
    return hidden.to(dtype), weight.to(dtype), targets


def exact_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return hidden.double() @ weight.double().t() / temperature


def normaliser_and_entropy(
    tops: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tops + sums[0].log(), sums[0].log() - sums[2] / sums[0]


def bound(logits: torch.Tensor, h: int) -> float:
    """Absolute error of what is summed from logits: theirs, and that of sums of exponentials over v
    columns."""
    return 8 * EPS * (float(logits.abs().max()) * max(h, 4) ** 0.5 + logits.shape[1] ** 0.5 + 8)


def check_sums(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> None:
    assert INTERPRETED
    logits = exact_logits(hidden, weight, temperature)
    tops, sums = partial_sums(
        hidden, weight, targets, temperature=temperature, with_entropy=True, chunk=4
    )
    log_p = logits.log_softmax(-1)
    found = (tops, *normaliser_and_entropy(tops, sums), sums[1])
    picked = torch.where(targets >= 0, logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    expected = (logits.amax(-1), logits.logsumexp(-1), -(log_p.exp() * log_p).sum(-1), picked)
    limit = bound(logits, hidden.shape[1])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=limit)
    without = partial_sums(
        hidden, weight, targets, temperature=temperature, with_entropy=False, chunk=4
    )
    assert (
        torch.equal(without[0], tops)
        and torch.equal(without[1][:2], sums[:2])
        and not without[1][2].any()
    )


@settings(max_examples=7)
@given(shape=shapes, seed=st.integers(0, 99), temperature=st.sampled_from([0.3, 1.0, 2.0]))
def test_sums_equal_float64(shape: tuple[int, int, int], seed: int, temperature: float) -> None:
    check_sums(*inputs(shape, seed), temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_summed_in_fp32(dtype: torch.dtype) -> None:
    check_sums(*inputs((9, 37, 11), 0, dtype), 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_that_descriptors_read_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, targets = inputs(
        (2 * TILES.rows + 3, TILES.split + 5, 2 * TILES.depth), 1, dtype
    )
    words: dict[str, Any] = {"temperature": 0.7, "with_entropy": True, "chunk": 4}
    found = partial_sums(hidden, weight, targets, **words)
    monkeypatch.setattr(linear_log_probs, "DESCRIPTORS", True)
    assert linear_log_probs._described(hidden, weight, TILES) is not None
    assert all(map(torch.equal, partial_sums(hidden, weight, targets, **words), found))


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_logits(scale: float) -> None:
    hidden, weight, targets = inputs((9, TILES.split + 5, 1), 0)
    # ties among logits of 1e4 and -1e4
    check_sums(torch.full_like(hidden, scale), weight.sign(), targets, 1.0)
    check_sums(hidden * scale, weight, targets, 1.0)


def test_equal_logits_have_the_entropy_of_their_number() -> None:
    tops, sums = partial_sums(
        torch.zeros(3, 4),
        torch.ones(37, 4),
        torch.zeros(3, dtype=torch.int64),
        temperature=1.0,
        with_entropy=True,
        chunk=8,
    )
    torch.testing.assert_close(
        normaliser_and_entropy(tops, sums)[1], torch.full((3,), 37.0).log(), rtol=4 * EPS, atol=0
    )


def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch() -> None:
    hidden, weight, targets = inputs((2 * TILES.rows + 3, 3 * TILES.split - 1, 11), 3)
    words = {"temperature": 0.9, "with_entropy": True, "chunk": 8}
    tops, sums = partial_sums(hidden, weight, targets, **words)  # type: ignore[arg-type]
    rows = torch.tensor([TILES.rows + 2, 0, 5])
    some, some_sums = partial_sums(hidden[rows], weight, targets[rows], **words)  # type: ignore[arg-type]
    assert torch.equal(tops[rows], some) and torch.equal(sums[:, rows], some_sums)


@settings(max_examples=7)
@given(
    shape=shapes,
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.3, 1.0]),
    entropy=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_gradients_equal_autograd_in_float64(
    shape: tuple[int, int, int], seed: int, temperature: float, entropy: bool, dtype: torch.dtype
) -> None:
    hidden, weight, targets = inputs(shape, seed, dtype)
    upstream = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(seed + 1))
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = exact_logits(*exact, temperature)
    log_p = logits.log_softmax(-1)
    log_z = logits.logsumexp(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    picked = torch.where(targets >= 0, logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    loss = ((picked - log_z) * upstream[0]).sum() + (entropies * upstream[1]).sum() * entropy
    expected = torch.autograd.grad(loss, exact)

    before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + 2))
    into = before.clone()
    given_back = Upstream(
        upstream[0],
        upstream[1] if entropy else None,
        log_z.detach().float(),
        entropies.detach().float(),
    )
    found = gradients(
        hidden, weight, targets, given_back, temperature=temperature, chunk=4, grad_weight_VH=into
    )
    assert found is not None and found.dtype == dtype
    # each logit's gradient is rounded once to the dtype, then products of it are summed (and
    # rounded once more)
    size = float(upstream.abs().sum(0).max()) * (2 + float(entropies.detach().max())) / temperature
    limit = 16 * size * (HALF_EPS[dtype] * 4 + bound(logits.detach(), shape[2]))
    torch.testing.assert_close(found.double(), expected[0], rtol=HALF_EPS[dtype], atol=limit)
    torch.testing.assert_close(
        (into - before).double(),
        expected[1],
        rtol=2 * HALF_EPS[dtype],
        atol=limit * len(hidden) ** 0.5,
    )
    assert (
        gradients(
            hidden, weight, targets, given_back, temperature=temperature, chunk=4, of_hidden=False
        )
        is None
    )


@settings(max_examples=3)
@given(
    shape=shapes,
    k=st.sampled_from([1, 3, 8, TILES.columns]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 1e4]),
)
def test_the_highest_logits_come_from_the_same_pass(
    shape: tuple[int, int, int], k: int, seed: int, dtype: torch.dtype, scale: float
) -> None:
    """The sums are those without it to their tolerance, the logits float64's, and each lies where
    it is said to."""
    hidden, weight, targets = inputs(shape, seed, dtype, scale)
    k = min(k, len(weight))
    best = torch.empty(len(hidden), k), torch.empty(len(hidden), k, dtype=torch.int64)
    words = {"temperature": 0.7, "with_entropy": True, "chunk": 4}
    found = partial_sums(hidden, weight, targets, best=best, **words)  # type: ignore[arg-type]
    assert all(map(torch.equal, found, partial_sums(hidden, weight, targets, **words)))  # type: ignore[arg-type]
    logits = exact_logits(hidden, weight, 0.7)
    limit = bound(logits, shape[2])
    torch.testing.assert_close(best[0].double(), logits.topk(k).values, rtol=0, atol=limit)
    torch.testing.assert_close(logits.gather(-1, best[1]), best[0].double(), rtol=0, atol=limit)
    assert all(len(set(row)) == k for row in best[1].tolist())
    assert torch.equal(best[0], best[0].sort(-1, descending=True).values)


def test_of_equal_logits_the_first_are_the_highest() -> None:
    weight = torch.zeros(TILES.split + 3, 4)
    weight[[5, TILES.split + 1]] = -torch.ones(4)
    best = torch.empty(2, 7), torch.empty(2, 7, dtype=torch.int64)
    none = torch.full((2,), -1)
    partial_sums(
        torch.ones(2, 4), weight, none, temperature=1.0, with_entropy=False, chunk=4, best=best
    )
    assert best[1].tolist() == [[0, 1, 2, 3, 4, 6, 7]] * 2 and not best[0].any()


def test_more_highest_logits_than_there_are_are_refused() -> None:
    hidden, weight, targets = inputs((3, 5, 4), 0)
    best = torch.empty(3, 6), torch.empty(3, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="highest logits of 3 rows over 5 columns"):
        partial_sums(
            hidden, weight, targets, temperature=1.0, with_entropy=False, chunk=4, best=best
        )


def test_a_shard_without_rows_adds_nothing() -> None:
    hidden, _, _ = inputs((3, 1, 4), 0)
    nothing = torch.full((3,), -1)
    tops, sums = partial_sums(
        hidden, torch.zeros(0, 4), nothing, temperature=1.0, with_entropy=True, chunk=2
    )
    assert tops.tolist() == [-torch.inf] * 3 and not sums.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4, dtype=torch.float64)}, "hidden is torch.float64"),
        (
            {"weight": torch.zeros(5, 4, dtype=torch.bfloat16)},
            "weight is torch.bfloat16; expected torch.float32",
        ),
        (
            {"weight": torch.zeros(4, 5).t()},
            "weight of shape .5, 4. and strides .1, 5. is not contiguous",
        ),
        ({"weight": torch.zeros(5, 3)}, r"hidden and weight must .* got \(3, 4\) and \(5, 3\)"),
        (
            {"targets": torch.zeros(2, dtype=torch.int64)},
            r"targets have shape \(2,\), but hidden has 3 rows",
        ),
        ({"targets": torch.zeros(3, dtype=torch.int32)}, "targets is torch.int32"),
        (
            {"weight": torch.zeros(5, 4, device="meta")},
            "weight is on meta, but the first tensor is on cpu",
        ),
        (
            {
                "hidden": torch.zeros(2**31, 4, device="meta"),
                "weight": torch.zeros(5, 4, device="meta"),
            },
            "at most",
        ),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    change: dict[str, torch.Tensor], message: str
) -> None:
    given_tensors = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(5, 4),
        "targets": torch.zeros(3, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        partial_sums(*given_tensors.values(), temperature=1.0, with_entropy=False, chunk=2)
