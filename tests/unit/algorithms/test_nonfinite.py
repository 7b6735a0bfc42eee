"""One number that is none is found wherever it stands, and the largest numbers are numbers."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.losses import not_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_wrong_value_is_found(wrong: float, dtype: torch.dtype) -> None:
    for place in (0, 1, 40, 998):
        values = torch.randn(999).to(dtype)
        assert not not_finite(values)
        values[place] = wrong
        assert not_finite(values) and not_finite(values.view(37, 27).t())


def test_the_largest_numbers_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert not not_finite(torch.tensor([largest, -largest, largest, largest]))
    assert not not_finite(torch.zeros(0)) and not not_finite(torch.zeros(()))
