"""Self-play: the policy learns a game against its own earlier weights.

Two players take turns removing 1, 2 or 3 stones from a pile, and whoever takes the last stone wins.
The best move leaves a multiple of 4 stones. A prompt is the number of stones left, and the answer
is the number of stones to take. Any other answer loses the game.
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
    """Options of the game. Games begin with 1 to `largest` stones. The opponent copies the policy's
    weights before the first step and then every `every` steps."""

    largest: int = 12
    every: int = 10


@flow("nim", roles=("policy", "opponent"), options=Options)
async def nim(run: Any) -> None:
    """Train the policy on the first move of each game. Policy and opponent then play it to the
    end."""
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
    """Return a function that samples one move of `player` for each pile."""

    async def move(piles: np.ndarray) -> np.ndarray:
        return numbers(await player.generate([str(pile) for pile in piles], 1))

    return move


async def perfect(piles: np.ndarray) -> np.ndarray:
    """Return the winning move for each pile, or 1 if there is none."""
    return np.maximum(piles % (MOST + 1), 1)


async def played(piles: np.ndarray, first: np.ndarray, other: Mover, own: Mover) -> np.ndarray:
    """Play the games to the end. Returns [B] bool: True if the player who starts with the moves
    `first` and continues with `own` wins against `other`."""
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
    """Return True for each move that leaves a multiple of 4 stones, omitting piles for which no
    move does."""
    winnable = piles % (MOST + 1) > 0
    return (moves == piles % (MOST + 1))[winnable]


def numbers(moves: Any) -> np.ndarray:
    """Return the number of stones that each answer takes; 0 if the answer is not a number."""
    return np.array([int(text) if text.isdecimal() else 0 for text in moves["response_text"]])
