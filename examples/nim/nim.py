"""Self-play: the policy learns a game against its own earlier weights.

Two players take 1, 2 or 3 stones of a pile in turns, and whoever takes the last one wins. The best
move leaves a multiple of 4 stones. A prompt is the number of stones that are left, and an answer
the number of stones that are taken. Any other answer loses the game.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow import flow

MOST = 3
Mover = Callable[[np.ndarray], Awaitable[np.ndarray]]  # piles [B] -> moves [B]


@dataclass(frozen=True)
class Options:
    """Games begin with 1 to `largest` stones. The opponent takes the policy's weights before the
    first step and every `every` steps from there."""

    largest: int = 12
    every: int = 10


@flow("nim", roles=("policy", "opponent"), options=Options)
async def nim(run: Any) -> None:
    """The first moves of games are learned; policy and opponent play on to the end."""
    policy, opponent = mover(run.policy), mover(run.opponent)
    piles = np.arange(1, run.options.largest + 1)
    async for step in run.steps():
        if step % run.options.every == 1 or run.options.every == 1:
            await run.opponent.take(run.policy)
        moves = await run.policy.generate([str(pile) for pile in piles])
        first = numbers(moves)
        given = piles[moves["uid"]]
        won = await played(given, first, opponent, policy)
        winnable = np.repeat(piles[piles % (MOST + 1) > 0], 4)
        beaten = await played(winnable, await policy(winnable), perfect, policy)
        run.record(beats_perfect=beaten.mean(), best=is_best(given, first).mean())
        moves = await run.policy.log_probs(moves.with_columns(scores=won.astype(np.float32)))
        await run.policy.update(run.advantages(moves))
        await run.sync()


def mover(player: Any) -> Mover:
    """A player that samples one move for each pile."""

    async def move(piles: np.ndarray) -> np.ndarray:
        return numbers(await player.generate([str(pile) for pile in piles], 1))

    return move


async def perfect(piles: np.ndarray) -> np.ndarray:
    """The best move, or where there is none one stone."""
    return np.maximum(piles % (MOST + 1), 1)


async def played(piles: np.ndarray, first: np.ndarray, other: Mover, own: Mover) -> np.ndarray:
    """[B] bool: whether the player wins that moves `first` and then as `own`, against `other`."""
    left = piles.copy()
    winner = np.full(len(piles), -1)
    live = np.arange(len(piles))
    moves, turn = first, 0
    while len(live):
        is_legal = (moves >= 1) & (moves <= np.minimum(MOST, left[live]))
        left[live[is_legal]] -= moves[is_legal]
        winner[live[~is_legal]] = 1 - turn
        winner[live[is_legal & (left[live] == 0)]] = turn
        live = np.flatnonzero(winner < 0)
        turn = 1 - turn
        moves = await (other if turn else own)(left[live]) if len(live) else moves
    return winner == 0


def is_best(piles: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Whether each move leaves a multiple of 4 stones, of the piles of which one does."""
    winnable = piles % (MOST + 1) > 0
    return (moves == piles % (MOST + 1))[winnable]


def numbers(moves: Any) -> np.ndarray:
    """The stones that the answers take; 0 for text that is no number."""
    return np.array([int(text) if text.isdecimal() else 0 for text in moves["response_text"]])
