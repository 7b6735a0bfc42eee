"""On a stand-in for a GPU: construction leaves nothing on the CPU, and no layer makes the host
wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.harness.ranks import run_ranks
from tests.models import LONG_TESTS_FULL, SYNCED

pytestmark = pytest.mark.slow
FAMILIES = [name for name in SYNCED if name not in LONG_TESTS_FULL]
# in `make test`: a dense family and one with latent attention in both ways, mixtures in the first
BOTH_WAYS = ("llama", "deepseek_v3")
FIRST_WAY = (*BOTH_WAYS, "qwen3_moe", "glm4_moe")


def of_families(first: str, second: str) -> list[Any]:
    """(family, way) of every family in two ways."""
    found = []
    for family in FAMILIES:
        for way, families in ((first, FIRST_WAY), (second, BOTH_WAYS)):
            marks = [] if family in families else [pytest.mark.full]
            found.append(pytest.param(family, way, marks=marks))
    return found


@pytest.mark.parametrize(("family", "dtype"), of_families("bfloat16", "float32"))
def test_nothing_is_left_on_the_cpu(family: str, dtype: str) -> None:
    (found,) = run_ranks(
        1, "tests.dist.cases.construction:left_on_the_cpu", family=family, dtype=dtype
    )
    assert len(found) == 6
    for role, (on_cpu, on_device) in found.items():
        assert on_cpu == [] and on_device > 20, role


@pytest.mark.parametrize(("family", "recompute"), of_families("full", "none"))
def test_the_host_waits_in_no_layer(family: str, recompute: str) -> None:
    """Reading a value raises, and so does a copy that the host would wait for. With experts on
    several ranks it must know how many rows go where: Megatron's token dispatcher waits for that
    once a layer."""
    (found,) = run_ranks(
        1, "tests.dist.cases.construction:host_waits", family=family, recompute=recompute
    )
    assert found == {"moved": 0}
