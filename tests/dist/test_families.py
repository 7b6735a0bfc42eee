"""Families against transformers on the same weights: log-probs of packed rows of 1 to 200 tokens,
and the gradient of an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.cases.families import LAYOUTS
from tests.dist.harness.ranks import run_ranks
from tests.models import ODD_FAMILIES

pytestmark = pytest.mark.slow
BOUND = 1e-5
SHORT = [1, 2, 3, 5, 8, 13]
LONG = [1, 2, 7, 8, 9, 31, 64, 65, 200, 1]


def wrong(cases: list[list[Any]], folder: Path, lengths: list[int], timeout_s: float) -> list[str]:
    """What differs from transformers, of all cases in one set of ranks."""
    found = run_ranks(
        2,
        "tests.dist.cases.families:run_cases",
        cases=cases,
        folder=str(folder),
        lengths=lengths,
        timeout_s=timeout_s,
    )[0]
    assert len(found) == len(cases)
    return [str(one) for one in found for value in list(one.values())[1:] if not value < BOUND]


def test_one_configuration_of_each_family_in_tensor_parallel_ranks(tmp_path: Path) -> None:
    cases = [
        [name, configs[0], "TP2", number % 3 == 0]
        for number, (name, configs) in enumerate(ODD_FAMILIES.items())
    ]
    assert wrong(cases, tmp_path, SHORT, 500) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ODD_FAMILIES)
def test_every_configuration_in_every_layout(name: str, tmp_path: Path) -> None:
    cases = [
        [f"{name} {number}", hf, layout, True]
        for number, hf in enumerate(ODD_FAMILIES[name])
        for layout in LAYOUTS
        if layout != "EP2" or any("experts" in key for key in hf)
    ]
    assert wrong(cases, tmp_path, LONG, 1500) == []
