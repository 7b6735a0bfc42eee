"""Run by test_kernels.py, in Triton's interpreter and with the torch forms: discounted sums, GAE
and V-trace against loops in float64.

Tolerance: a sum of n terms in fp32, in any order, is off by at most about n eps (eps = 2^-24) times
the sum of their magnitudes, which is below n times the largest term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow_kernels import INTERPRETED
from hybridflow_kernels.scans import discounted_sums, gae, vtrace

EPS = 2.0**-24
LENGTHS = st.lists(st.sampled_from([0, 1, 3, 4, 5, 9]), min_size=1, max_size=5)
UNIT = st.sampled_from([0.0, 0.5, 0.97, 1.0])


def columns(
    lengths: Sequence[int], seed: int, masked: bool, scale: float = 1.0
) -> list[torch.Tensor]:
    """Rewards, values, log-ratios [T] and the mask [T]."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(sum(lengths), generator=generator) * scale for _ in range(2)]
    log_ratios = torch.randn(sum(lengths), generator=generator)
    mask = torch.rand(sum(lengths), generator=generator) < (0.6 if masked else 1.1)
    return [*found, log_ratios, mask]


def by_loop(
    given_columns: Sequence[torch.Tensor],
    lengths: Sequence[int],
    gamma: float,
    lam: float,
    clips: tuple[float, float] | None,
) -> tuple[list[float], list[float], list[float]]:
    """y, y + V and V-trace's advantages, token by token from the end; clips None: no ratios."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    rows = ([part.tolist() for part in column.split(list(lengths))] for column in given_columns)
    for r, v, log_ratio, kept in zip(*rows, strict=True):
        total = value = 0.0
        row: list[tuple[float, float, float]] = []
        for t in reversed(range(len(r))):
            if not kept[t]:
                row.append((0.0, 0.0, 0.0))
                continue
            ratio = math.exp(log_ratio[t])
            rho, c = (min(ratio, clip) for clip in clips) if clips else (1.0, 1.0)
            advantage = rho * (r[t] + gamma * (value + total) - v[t])
            total = rho * (r[t] + gamma * value - v[t]) + gamma * lam * c * total
            value = v[t]
            row.append((total, total + value, advantage))
        for out, column in zip(found, zip(*reversed(row), strict=True), strict=False):
            out.extend(column)
    return found


def same(found: torch.Tensor, expected: list[float], longest: int) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    size = 4 * max(float(wanted.abs().max()) if len(wanted) else 0.0, 1.0)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=(longest + 8) ** 2 * EPS * size)


@settings(max_examples=4 if INTERPRETED else 40)
@given(lengths=LENGTHS, gamma=UNIT, lam=UNIT, masked=st.booleans(), seed=st.integers(0, 99))
def test_all_three_equal_a_loop(
    lengths: list[int], gamma: float, lam: float, masked: bool, seed: int
) -> None:
    rewards, values, log_ratios, mask = columns(lengths, seed, masked)
    sizes = torch.tensor(lengths)
    longest = max(lengths)
    mask_or_none = mask if masked else None
    every = by_loop((rewards, values, log_ratios, mask), lengths, gamma, lam, None)
    advantages, returns = gae(rewards, values, sizes, gamma=gamma, lam=lam, mask_T=mask_or_none)
    same(advantages, every[0], longest)
    same(returns, every[1], longest)
    sums = discounted_sums(rewards, sizes, gamma=gamma, mask_T=mask_or_none)
    nothing = torch.zeros_like(values)
    same(sums, by_loop((rewards, nothing, log_ratios, mask), lengths, gamma, 1.0, None)[0], longest)
    expected = by_loop((rewards, values, log_ratios, mask), lengths, gamma, lam, (1.2, 0.9))
    policy, targets = vtrace(
        rewards,
        values,
        log_ratios,
        sizes,
        gamma=gamma,
        lam=lam,
        rho_clip=1.2,
        c_clip=0.9,
        mask_T=mask_or_none,
    )
    same(policy, expected[2], longest)
    same(targets, expected[1], longest)


def test_extreme_values_and_ratios() -> None:
    lengths = [9, 0, 5]
    rewards, values, log_ratios, mask = columns(lengths, 0, masked=True, scale=1e4)
    expected = by_loop((rewards, values, log_ratios * 50, mask), lengths, 1.0, 1.0, (1.0, 1.0))
    found = vtrace(rewards, values, log_ratios * 50, torch.tensor(lengths), gamma=1.0, mask_T=mask)
    same(found[0], expected[2], 9)
    same(found[1], expected[1], 9)


def test_rows_have_the_same_bits_alone() -> None:
    # the torch form takes 41 rows a step: whole vectors of the processor, and a rest
    number, longest = (5, 9) if INTERPRETED else (41, 50)
    lengths = torch.randint(
        0, longest, (number,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    rewards, values, log_ratios, _ = columns(lengths, 1, masked=False)
    together = (
        *gae(rewards, values, torch.tensor(lengths), gamma=0.99, lam=0.9),
        *vtrace(rewards, values, log_ratios, torch.tensor(lengths), gamma=0.99),
    )
    parts = zip(*(column.split(lengths) for column in (rewards, values, log_ratios)), strict=True)
    alone = [
        (
            *gae(r, v, torch.tensor([len(r)]), gamma=0.99, lam=0.9),
            *vtrace(r, v, x, torch.tensor([len(r)]), gamma=0.99),
        )
        for r, v, x in parts
    ]
    for whole, pieces in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))


def test_on_policy_v_trace_is_gae() -> None:
    lengths = [7, 3]
    rewards, values, log_ratios, mask = columns(lengths, 2, masked=True)
    sizes = torch.tensor(lengths)
    advantages, returns = gae(rewards, values, sizes, gamma=0.9, lam=1.0, mask_T=mask)
    policy, targets = vtrace(
        rewards, values, torch.zeros_like(log_ratios), sizes, gamma=0.9, mask_T=mask
    )
    same(policy, advantages.tolist(), 7)
    same(targets, returns.tolist(), 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths_S": torch.tensor([2, 2])}, "rewards has 5 tokens, but the 2 rows have 4"),
        ({"lengths_S": torch.tensor([6, -1])}, "lengths must not be negative, got -1"),
        ({"lengths_S": torch.tensor([2, 3], dtype=torch.int32)}, "lengths is torch.int32"),
        ({"values_T": torch.zeros(4)}, "values has 4 tokens"),
        ({"values_T": torch.zeros(5, device="meta")}, "values is on meta"),
        ({"values_T": torch.zeros(5, 1)}, r"values has shape \(5, 1\)"),
        (
            {"values_T": torch.zeros(10)[::2]},
            "values of shape .5,. and strides .2,. is not contiguous",
        ),
        ({"mask_T": torch.ones(5)}, "mask is torch.float32; expected torch.bool"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    change: dict[str, torch.Tensor], message: str
) -> None:
    words = {
        "rewards_T": torch.zeros(5),
        "values_T": torch.zeros(5),
        "lengths_S": torch.tensor([2, 3]),
    } | change
    with pytest.raises(ValueError, match=message):
        gae(**words, gamma=1.0, lam=1.0)  # type: ignore[arg-type]
