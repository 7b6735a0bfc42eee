"""The gated delta rule over packed rows against the recurrence, token by token in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hybridflow.mcore.delta_rule import chunked_delta_rule, convolved, delta_rule
from hybridflow.mcore.packed import _segments
from tests.unit.mcore.delta_recurrence import inputs, recurrent

LENGTHS = [1, 2, 7, 8, 9, 31, 63, 64, 65, 128, 129, 200, 1]


def params_of(lengths: list[int]) -> Any:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return _segments(bounds, np.ones(bounds[-1], bool))


def test_packed_rows_are_as_each_row_alone_and_so_are_gradients() -> None:
    parts = [part.requires_grad_() for part in inputs(sum(LENGTHS))]
    out = delta_rule(*parts, params_of(LENGTHS))
    exact = [part.detach().double().requires_grad_() for part in parts]
    rows = zip(*(part.split(LENGTHS) for part in exact), strict=True)
    expected = torch.cat([recurrent(list(row)) for row in rows])
    assert float((out - expected).abs().max()) < 2e-6
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    out.backward(direction)
    expected.backward(direction.double())
    for ours, theirs in zip(parts, exact, strict=True):
        scale = float(theirs.grad.abs().max())
        assert float((ours.grad - theirs.grad).abs().max()) < 5e-6 * scale


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit: the other rows are changed, also to huge values."""
    parts = inputs(sum(LENGTHS))
    out = delta_rule(*parts, params_of(LENGTHS))
    for number in range(len(LENGTHS)):
        first = sum(LENGTHS[:number])
        mine = slice(first, first + LENGTHS[number])
        changed = [part * 30.0 for part in parts]
        for part, original in zip(changed, parts, strict=True):
            part[mine] = original[mine]
        again = delta_rule(*changed, params_of(LENGTHS))
        assert torch.equal(again[mine], out[mine])


@pytest.mark.parametrize("length", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_any_chunk_gives_the_same(length: int, chunk: int) -> None:
    query, key, value, decay, beta = (part.transpose(0, 1)[None] for part in inputs(length))
    found = [
        chunked_delta_rule(query, F.normalize(key, dim=-1), value, decay, beta, size)
        for size in (chunk, length)
    ]
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kernel", [1, 2, 4, 5])
def test_the_convolution_reads_no_other_row(kernel: int) -> None:
    generator = torch.Generator().manual_seed(5)
    channels = 7
    x = torch.randn(sum(LENGTHS), channels, generator=generator, requires_grad=True)
    weight = torch.randn(channels, 1, kernel, generator=generator)
    params = params_of(LENGTHS)
    out = convolved(x, weight, params)
    alone = [
        F.conv1d(F.pad(row.t(), (kernel - 1, 0))[None], weight, groups=channels)[0].t()
        for row in x.split(LENGTHS)
    ]
    torch.testing.assert_close(out, torch.cat(alone), atol=1e-5, rtol=0)
    # the last token of a row has no influence on the next row, the first none on the one before
    second = sum(LENGTHS[:4])
    [grad] = torch.autograd.grad(out[second : second + LENGTHS[4]].sum(), x)
    assert grad[:second].abs().max() == 0 and grad[second + LENGTHS[4] :].abs().max() == 0
    assert grad[second].abs().max() > 0
