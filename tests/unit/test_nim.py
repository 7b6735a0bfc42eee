"""examples/nim: games are played by the rules, and the flow passes the check before a start."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from hybridflow.config.registry import import_file
from hybridflow.config.schema import AlgorithmConfig, PolicyConfig
from hybridflow.trainer.flow_check import check_flow
from tests.unit.trainer.worlds import config_of

FILE = Path(__file__).resolve().parents[2] / "examples" / "nim" / "nim.py"


@pytest.fixture(scope="module")
def nim() -> ModuleType:
    return import_file(FILE, "algorithm.flow")


def test_a_perfect_player_wins_from_the_piles_that_the_rules_say(nim: ModuleType) -> None:
    piles = np.arange(1, 41)

    async def won() -> np.ndarray:
        found: np.ndarray = await nim.played(
            piles, await nim.perfect(piles), nim.perfect, nim.perfect
        )
        return found

    # by search: a pile wins if a move leads to one that does not
    wins = [False]
    for pile in piles.tolist():
        wins.append(not all(wins[pile - move] for move in range(1, min(3, pile) + 1)))
    assert asyncio.run(won()).tolist() == wins[1:]


def test_games_end_as_their_moves_say(nim: ModuleType) -> None:
    """Games of recorded moves, legal and illegal, and who wins them."""
    games = [
        (3, [3], True),
        (3, [2, 1], False),
        (5, [1, 3, 1], True),
        (5, [0], False),
        (2, [3], False),
        (6, [4], False),
        (7, [1, 9], True),
        (7, [3, 3, 2], False),
    ]

    def mover(first: int) -> object:
        step = [first]

        async def move(piles: np.ndarray) -> np.ndarray:
            live = [moves for _, moves, _ in games if len(moves) > step[0]]
            assert len(live) == len(piles)
            found = [moves[step[0]] for moves in live]
            step[0] += 2
            return np.array(found)

        return move

    piles = np.array([pile for pile, _, _ in games])
    first = np.array([moves[0] for _, moves, _ in games])
    won = asyncio.run(nim.played(piles, first, mover(1), mover(2)))
    assert won.tolist() == [is_won for _, _, is_won in games]


def test_the_best_moves_leave_a_multiple_of_four(nim: ModuleType) -> None:
    piles = np.array([1, 4, 5, 7, 8])
    assert nim.is_best(piles, np.array([1, 1, 2, 3, 3])).tolist() == [True, False, True]


def test_the_flow_passes_the_check_before_a_start(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    opponent = PolicyConfig(config.model, config.actor, config.rollout, frozen=True)
    algorithm = AlgorithmConfig(flow=f"{FILE}:nim", flow_options={"every": 1})
    said = list[str]()
    check_flow(replace(config, algorithm=algorithm, roles={"opponent": opponent}), said.append)
    assert said == []
