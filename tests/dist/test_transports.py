"""Every transport under one contract: exact bytes, typed errors within the deadline, nothing left
behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.sync.transports.base import TRANSPORTS as BUILT_IN
from tests.dist.cases import transport as cases
from tests.dist.harness.ranks import TORCH, run_ranks

pytestmark = pytest.mark.slow

# those of CPU buffers, what stands for memory of a GPU, and a session over two nodes that uses both
DEVICE_TWIN = Path(__file__).parent / "harness/device_twin.py"
TRANSPORTS = (
    *(name for name in BUILT_IN.names() if "cpu" in BUILT_IN.get(name).devices),
    *(f"{DEVICE_TWIN}:{name}" for name in ("device_twin", "two_nodes")),
)
Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, Path]:
    """One start of seven processes goes through all layouts and all faults of all transports."""
    folder = tmp_path_factory.mktemp("transports")
    arguments = {"transports": TRANSPORTS, "folder": str(folder)}
    return run_ranks(
        7, "tests.dist.cases.transport:all_syncs", timeout_s=500, loaded=TORCH, **arguments
    ), folder


@pytest.fixture(params=TRANSPORTS, ids=cases.entry_name)
def good(request: pytest.FixtureRequest, everything: tuple[Facts, Path]) -> tuple[str, Facts]:
    """What each rank saw in good syncs."""
    return request.param, [rank[request.param]["good"] for rank in everything[0]]


@pytest.fixture(params=TRANSPORTS[:-1], ids=cases.entry_name)
def bad(request: pytest.FixtureRequest, everything: tuple[Facts, Path]) -> tuple[str, Facts, Path]:
    """What each of the first six ranks saw of faults."""
    return request.param, [rank[request.param]["bad"] for rank in everything[0][:6]], everything[1]


def engines_of(facts: Facts, name: str) -> Facts:
    return [rank[name] for rank in facts[cases.TRAINERS :] if name in rank]


@pytest.mark.parametrize("name", ["TP2", "TP2 and TP1", "TP2 and TP1 in bf16"])
def test_every_element_arrives_at_every_sync(good: tuple[str, Facts], name: str) -> None:
    engines = engines_of(good[1], name)
    assert len(engines) == (2 if name == "TP2" else 3)
    for rank in engines:
        assert [sync["right"] for sync in rank["syncs"]] == [True] * len(cases.STAGED)
        # nothing is written before the commit when staged; in place there is nothing left for it
        assert [sync["untouched"] for sync in rank["syncs"]] == list(cases.STAGED)


@pytest.mark.parametrize("name", ["TP2", "TP2 and TP1", "TP2 and TP1 in bf16"])
def test_the_bytes_are_the_analytic_minimum(good: tuple[str, Facts], name: str) -> None:
    engines = engines_of(good[1], name)
    trainers = [rank[name] for rank in good[1][: cases.TRAINERS]]
    for rank in engines:
        assert {sync["payload_bytes"] for sync in rank["syncs"]} == {rank["minimum"]}
    for turn in range(len(cases.STAGED)):
        sent = [rank["syncs"][turn] for rank in trainers]
        assert sum(s["payload_bytes"] for s in sent) == sum(rank["minimum"] for rank in engines)
        assert sum(s["overhead_bytes"] for s in sent) == 8 * sum(s["messages"] for s in sent)
        assert sum(s["messages"] for s in sent) == sum(
            rank["syncs"][turn]["messages"] for rank in engines
        )


@pytest.mark.parametrize("name", ["TP2", "TP2 and TP1", "TP2 and TP1 in bf16"])
def test_memory_stays_within_its_bound(good: tuple[str, Facts], name: str) -> None:
    engines = engines_of(good[1], name)
    for rank in (facts[name] for facts in good[1][: cases.TRAINERS]):
        for sync in rank["syncs"]:
            assert 0 < sync["peak_staging_bytes"] <= rank["bound"]
            assert sync["largest_allocation"] < engines[0]["whole"], (
                "a sender made room for a whole tensor"
            )
    for rank in engines:
        for sync in rank["syncs"]:
            assert 0 < sync["peak_staging_bytes"] <= sync["bound"]
            if not sync["staged"]:
                assert sync["largest_allocation"] < rank["whole"], (
                    "a receiver made room for a whole tensor"
                )


def test_nothing_stays_open(good: tuple[str, Facts]) -> None:
    assert [rank["left"] for rank in good[1]] == [[]] * 7
    for rank in good[1][1:]:  # rank 0 serves the store and has the others' connections open
        assert [facts["files"] for facts in rank.values() if isinstance(facts, dict)] == [0] * (
            len(rank) - 1
        )


def test_a_changed_byte_is_found_and_named(bad: tuple[str, Facts, Path]) -> None:
    errors = [rank["flip trainer"]["error"] for rank in bad[1][cases.TRAINERS :]]
    found = [error for error in errors if "checksum" in error]
    assert len(found) == 1
    assert f"from trainer rank {cases.BAD_TRAINER}, bucket" in found[0]
    assert found[0].startswith("engine rank ")
    assert (
        "(starting at model.layers." in found[0]
        or "(starting at lm_head" in found[0]
        or "(starting at model.norm" in found[0]
    )


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_killed_peer_is_named_at_once(bad: tuple[str, Facts, Path], side: str) -> None:
    transport, facts, _ = bad
    number = cases.BAD_TRAINER if side == "trainer" else cases.TRAINERS + cases.BAD_ENGINE
    outcomes = [rank[f"kill {side}"] for rank in facts]
    assert outcomes[number] == {"ended_by": -9}
    _peers_know(
        transport, outcomes, side, cases.DEADLINES["kill"], word="is gone: its process has ended"
    )


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_stalled_peer_is_named_at_the_deadline(bad: tuple[str, Facts, Path], side: str) -> None:
    transport, facts, _ = bad
    outcomes = [rank[f"stall {side}"] for rank in facts]
    _peers_know(
        transport, outcomes, side, cases.DEADLINE, word=f"made no progress for {cases.DEADLINE:g} s"
    )


def _peers_know(transport: str, outcomes: Facts, side: str, deadline_s: float, word: str) -> None:
    """Ranks that wait for the bad rank say so, and how they know it: by its end, before the
    deadline has passed, or by the deadline. A rank may wait for one that waits itself, so two
    deadlines can add up."""
    others = outcomes[cases.TRAINERS :] if side == "trainer" else outcomes[: cases.TRAINERS]
    bad_name = (
        f"trainer rank {cases.BAD_TRAINER}"
        if side == "trainer"
        else f"engine rank {cases.BAD_ENGINE}"
    )
    named = [
        o
        for o in others
        if f"with {bad_name} over {transport}" in o["error"] and word in o["error"]
    ]
    assert named, [o["error"] for o in others]
    for outcome in named:
        assert f"(deadline {deadline_s:g} s)" in outcome["error"]
        assert outcome["seconds"] < 30.0
        assert re.search(r"\(bucket \d+, starting at \S+\)$", outcome["error"]), outcome["error"]
    assert all(o["right"] is not True for o in outcomes if side == "trainer" and "right" in o)


def test_a_rank_that_does_not_come_is_named(bad: tuple[str, Facts, Path]) -> None:
    for rank in (0, cases.TRAINERS):
        assert "trainer rank 9 did not arrive within 1 s" in bad[1][rank]["absent"]


def test_after_every_fault_a_new_session_works_and_nothing_is_left(
    bad: tuple[str, Facts, Path],
) -> None:
    _, facts, _ = bad
    assert [rank["after"]["error"] for rank in facts] == [""] * 6
    assert [rank["after"]["right"] for rank in facts[cases.TRAINERS :]] == [True, True]
    assert [rank["left"] for rank in facts] == [[]] * 6
