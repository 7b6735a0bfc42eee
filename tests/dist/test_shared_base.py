"""Two policies whose adapters share one base: bit for bit what the same two policies are on ranks
of their own, in every layout; the base is in memory once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main
from tests.dist.cases.shared_base import CASES, NAMES
from tests.dist.harness.ranks import run_ranks

pytestmark = pytest.mark.slow


def measured(folder: Path, world: int, names: list[str]) -> list[dict[str, Any]]:
    ranks = run_ranks(
        world,
        "tests.dist.cases.shared_base:run_cases",
        timeout_s=400,
        names=names,
        folder=str(folder),
    )
    return [result for rank in ranks for result in rank]


def check(folder: Path, results: list[dict[str, Any]], names: list[str]) -> None:
    assert {result["name"] for result in results} == set(names)
    assert {(r["name"], one) for r in results for one in r["different"]} == set()
    assert {(r["name"], one) for r in results for one in r["touched"]} == set()
    assert all(result["resumed"] for result in results)
    # the second policy adds its factors and nothing else
    assert max(result["shared bytes"] for result in results) < 1.2
    assert min(result["apart bytes"] for result in results) > 1.8
    # embeddings and experts' routers are built, and freed when the base's take their place
    assert max(result["built"] for result in results) < 0.3
    for name in names:
        for policy in NAMES:
            files = [
                sorted((folder / name / kind / f"{policy}-merged").glob("*.safetensors"))
                for kind in ("shared", "apart")
            ]
            assert [one.read_bytes() for one in files[0]] == [one.read_bytes() for one in files[1]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, measured(folder, 2, [name for name, case in CASES.items() if case.quick])


def test_policies_on_one_base_train_as_those_on_two(quick: tuple[Path, Any]) -> None:
    """Log-probs, references, factors, optimizers, metrics, merged weights and exports; an update of
    one leaves the other's state and the base; a resumed pair goes on exactly."""
    folder, results = quick
    check(folder, results, [name for name, case in CASES.items() if case.quick])


@pytest.mark.full
def test_policies_on_one_base_in_further_layouts(tmp_path: Path) -> None:
    names = [name for name, case in CASES.items() if not case.quick]
    check(tmp_path, measured(tmp_path, 4, names), names)


@pytest.mark.parametrize("policy", NAMES)
def test_exported_adapters_are_those_of_a_policy_with_its_own_base(
    quick: tuple[Path, Any], tmp_path: Path, policy: str
) -> None:
    folder, _ = quick
    for kind in ("shared", "apart"):
        at = str(folder / "dense TP2" / kind / policy)
        assert main(["checkpoint", "export", at, str(tmp_path / kind), "--adapter"]) == 0
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shared, apart = ((tmp_path / kind / file).read_bytes() for kind in ("shared", "apart"))
        assert shared == apart
