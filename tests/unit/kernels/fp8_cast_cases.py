"""Run by test_kernels.py in Triton's interpreter: scales and fp8 values, bit for bit those of the
torch form.

The torch form is torch's own conversion of float32 quotients; where a value is not a number, both
say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow_kernels import fp8_cast
from hybridflow_kernels.fp8_cast import block_scales, write_scales, write_weights

BLOCKS = st.sampled_from([(8, 16), (4, 4), (1, 16), (3, 5)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def torch_form(function: Callable[..., None], *arguments: Any) -> None:
    kept = fp8_cast.uses_triton
    fp8_cast.uses_triton = lambda tensor: False  # type: ignore[assignment]
    try:
        function(*arguments)
    finally:
        fp8_cast.uses_triton = kept


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    lost = expected.float().isnan()
    ours = found.view(torch.uint8)
    theirs = expected.view(torch.uint8)
    if found.dtype == torch.float32:
        ours = found.view(torch.int32)
        theirs = expected.view(torch.int32)
    return torch.equal(found.float().isnan(), lost) and torch.equal(ours[~lost], theirs[~lost])


def both(
    weights: torch.Tensor, block: tuple[int, int], row: int = 0, column: int = 0, shape: Any = None
) -> None:
    n, r, c = weights.shape
    scales = [torch.full((n, -(-r // block[0]), -(-c // block[1])), -1.0) for _ in range(2)]
    write_scales(weights, block, scales[0])
    torch_form(write_scales, weights, block, scales[1])
    assert same_bits(*scales) and same_bits(scales[0], block_scales(weights, block))
    values = [torch.empty(shape or weights.shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
    write_weights(weights, block, row, column, values[0])
    torch_form(write_weights, weights, block, row, column, values[1])
    assert same_bits(*values)


@settings(max_examples=6)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 19), st.integers(1, 35)),
    block=BLOCKS,
    dtype=DTYPES,
    scale=st.sampled_from([1.0, 1e-30, 1e4, 2.0**-40]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_scales_and_values_have_the_bits_of_the_torch_form(
    shape: tuple[int, int, int],
    block: tuple[int, int],
    dtype: torch.dtype,
    scale: float,
    seed: int,
    data: st.DataObject,
) -> None:
    weights = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    if data.draw(st.booleans()):
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)  # other strides
    row = data.draw(st.integers(0, shape[1] - 1))
    column = data.draw(st.integers(0, shape[2] - 1))
    height = data.draw(st.integers(1, shape[1] - row))
    width = data.draw(st.integers(1, shape[2] - column))
    both(weights, block, row, column, (shape[0], height, width))


def test_every_rounding_of_fp8() -> None:
    """Each value of float8_e4m3fn, each middle between two, and the neighbours of both, in a block
    whose scale is 1."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    around = torch.cat([every, middles])
    up, down = (torch.nextafter(around, torch.tensor(side)) for side in (torch.inf, -torch.inf))
    values = torch.cat([around, up[up <= 448], down, torch.tensor([448.0])])
    both(torch.cat([values, -values])[None, None], (1, 2048))


def test_zeros_and_what_is_not_finite() -> None:
    weights = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    weights[0, 0, 0], weights[0, 0, 5], weights[0, 4:, :4] = torch.nan, torch.inf, 0.0
    weights[0, 4, 4:8] = torch.finfo(torch.float32).tiny / 4
    both(weights, (4, 4))
    both(-weights, (4, 4))


@pytest.mark.parametrize(
    ("weights", "out", "message"),
    [
        (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4), "out is torch.float32"),
        (torch.zeros(4, 4), torch.zeros(1, 4, 4, dtype=torch.float8_e4m3fn), "expected floats"),
        (
            torch.zeros(1, 4, 4).int(),
            torch.zeros(1, 4, 4, dtype=torch.float8_e4m3fn),
            "torch.int32",
        ),
        (torch.zeros(2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.float8_e4m3fn), "out is"),
        (
            torch.zeros(1, 4, 4),
            torch.zeros(1, 5, 4, dtype=torch.float8_e4m3fn),
            "is not inside weights",
        ),
        (
            torch.zeros(1, 4, 4),
            torch.zeros(1, 4, 4, dtype=torch.float8_e4m3fn, device="meta"),
            "on meta",
        ),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    weights: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_weights(weights, (4, 4), 0, 0, out)
