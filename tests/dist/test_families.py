"""Families against transformers on the same weights: log-probs of packed rows of 1 to 200 tokens,
and the gradient of an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.cases.families import LAYOUTS
from tests.dist.harness.exact import wide
from tests.dist.harness.ranks import run_ranks
from tests.dist.harness.rounding import FACTOR
from tests.models import ODD_FAMILIES
from tests.unit.mcore.delta_recurrence import inputs, recurrent

pytestmark = pytest.mark.slow
BOUND = 1e-5
SHORT = [1, 2, 3, 5, 8, 13]
LONG = [1, 2, 7, 8, 9, 31, 64, 65, 200, 1]


def wrong(
    cases: list[list[Any]],
    folder: Path,
    lengths: list[int],
    timeout_s: float,
    **how: Any,
) -> list[str]:
    """What differs from transformers, of all cases in one set of ranks; `how` goes to them.

    With rounding, the bound is that of transformers' own float32 if it is larger.
    """
    found = run_ranks(
        2,
        "tests.dist.cases.families:run_cases",
        cases=cases,
        folder=str(folder),
        lengths=lengths,
        timeout_s=timeout_s,
        **how,
    )[0]
    assert len(found) == len(cases)
    bad = []
    for one in found:
        print(json.dumps(one))
        rounding = one.get("rounding", {})
        bad += [
            str(one)
            for name, value in one.items()
            if name not in ("name", "rounding")
            and not value < max(BOUND, FACTOR * rounding.get(name, 0.0))
        ]
    return bad


def test_the_oracles_delta_nets_are_in_float64() -> None:
    """transformers' rule by itself rounds to float32, whatever it is given."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = inputs(100, torch.float64)
    expected = recurrent([query, key, value, decay, beta])
    parts = {"query": query, "key": key, "value": value, "g": decay, "beta": beta}
    named = {name: part[None] for name, part in parts.items()}

    def rule() -> torch.Tensor:
        out, _ = torch_chunk_gated_delta_rule(**named, use_qk_l2norm_in_kernel=True)
        return out[0]

    assert float((wide(rule)() - expected).abs().max()) < 1e-13
    assert float((rule() - expected).abs().max()) > 1e-8


@pytest.mark.usefixtures("megatron")
def test_one_configuration_of_each_family_in_tensor_parallel_ranks(tmp_path: Path) -> None:
    """With the Megatron-Core of both lanes: layers that its specification cannot express are
    written into it, and its form differs."""
    cases = [
        [name, configs[0], "TP2", number % 3 == 0]
        for number, (name, configs) in enumerate(ODD_FAMILIES.items())
    ]
    assert wrong(cases, tmp_path, SHORT, 500) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ODD_FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        {"initial": "transformers"},
        # Weights ten times as large, as in a model 100 times as wide, and norms and biases that
        # differ: float32 alone moves log-probs of long rows by up to 4e-5.
        {"initial": "shaken", "with_rounding": True},
    ],
    ids=lambda how: how["initial"],
)
def test_every_configuration_in_every_layout(
    name: str, how: dict[str, Any], tmp_path: Path
) -> None:
    cases = [
        [f"{name} {number}", hf, layout, True]
        for number, hf in enumerate(ODD_FAMILIES[name])
        for layout in LAYOUTS
        if layout != "EP2" or any("experts" in key for key in hf)
    ]
    assert wrong(cases, tmp_path, LONG, 1500, **how) == []
