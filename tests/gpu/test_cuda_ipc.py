"""The contract of the transports over memory of one GPU that seven processes share."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.device.platform import Platform
from tests.dist.cases import transport as cases
from tests.dist.harness.ranks import NOTHING, run_ranks

pytestmark = pytest.mark.skipif(Platform.detect().kind != "cuda", reason="needs a GPU")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("transports"))
    arguments = {"transports": ["cuda_ipc"], "folder": folder, "device": "cuda:0"}
    found = run_ranks(
        7,
        "tests.dist.cases.transport:all_syncs",
        timeout_s=500,
        loaded=NOTHING,
        platform="cuda",
        **arguments,
    )
    return [rank["cuda_ipc"] for rank in found]


def test_every_element_arrives_at_every_sync(facts: list[dict[str, Any]]) -> None:
    for name in ("TP2", "TP2 and TP1", "TP2 and TP1 in bf16"):
        engines = [rank["good"][name] for rank in facts[cases.TRAINERS :] if name in rank["good"]]
        assert [[sync["right"] for sync in engine["syncs"]] for engine in engines] == [
            [True] * 4
        ] * len(engines)


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize(
    ("deed", "word"), [("kill", "its process has ended"), ("stall", "made no progress for")]
)
def test_a_peer_that_dies_or_stalls_is_named(
    facts: list[dict[str, Any]], deed: str, word: str, side: str
) -> None:
    others = facts[cases.TRAINERS : 6] if side == "trainer" else facts[: cases.TRAINERS]
    assert any(word in rank["bad"][f"{deed} {side}"]["error"] for rank in others)


def test_a_changed_byte_is_found(facts: list[dict[str, Any]]) -> None:
    errors = [rank["bad"]["flip trainer"]["error"] for rank in facts[cases.TRAINERS : 6]]
    assert sum("checksum" in error for error in errors) == 1


def test_after_every_fault_a_new_session_works(facts: list[dict[str, Any]]) -> None:
    assert [rank["bad"]["after"]["error"] for rank in facts[:6]] == [""] * 6
    assert [rank["bad"]["after"]["right"] for rank in facts[cases.TRAINERS : 6]] == [True, True]
