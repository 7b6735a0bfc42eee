"""Load balancing: computes sequence costs and distributes sequences across ranks, and requests
across engines. Pure numpy.

A greedy solution (longest processing time first) is improved by swapping items between expensive
and cheap ranks. A swap is applied only if it lowers the cost of the more expensive rank, so the
greedy solution's bounds still hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Costs = np.ndarray | Sequence[float]

_MAX_ROUNDS = 24
_PATIENCE = 4  # rounds without a swap
_ENOUGH = 2e-4  # relative to the mean: a smaller imbalance is not worth another round


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a forward pass over one sequence: `per_token` for each token plus `per_pair` for
    each pair of tokens (attention)."""

    per_token: float
    per_pair: float

    @classmethod
    def of_model(cls, hf_config: Mapping[str, Any]) -> SequenceCost:
        """Derive the costs from the model shape in a Hugging Face config by counting
        multiplications: weight matrices per token, attention scores and values per causal pair.

        Missing fields default to a plain dense model. Without hidden_size or num_hidden_layers, the
        cost is the number of tokens.
        """
        hidden = int(hf_config.get("hidden_size", 0))
        layers = int(hf_config.get("num_hidden_layers", 0))
        if not hidden or not layers:
            return cls(1.0, 0.0)
        heads = int(hf_config.get("num_attention_heads", 1))
        head_dim = int(hf_config.get("head_dim") or hidden // heads)
        kv_heads = int(hf_config.get("num_key_value_heads") or heads)
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        experts = int(hf_config.get("num_experts_per_tok") or 0)
        width = experts * int(hf_config.get("moe_intermediate_size") or 0) or int(
            hf_config.get("intermediate_size") or 4 * hidden
        )
        router = hidden * int(hf_config.get("num_experts") or 0)
        head = hidden * int(hf_config.get("vocab_size") or 0)
        return cls(
            float(layers * (attention + 3 * hidden * width + router) + head),
            float(layers * 2 * heads * head_dim) / 2,
        )

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the cost of each sequence [B] f64, relative to the cost of one token in a short
        sequence: `lengths` plus the quadratic term."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens + (self.per_pair / self.per_token) * tokens * tokens


def checked_costs(costs: Costs) -> np.ndarray:
    """Return the costs [B] as f64. Raises ValueError if one is negative or not finite."""
    weights = np.asarray(costs, dtype=np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("costs must be finite and not negative")
    return weights


def balance(costs: Costs, num_ranks: int, *, equal_counts: bool = False) -> list[np.ndarray]:
    """Distribute items across ranks so that the highest load (sum of costs on one rank) is small,
    using longest processing time first, then swaps.

    The highest load is at most the mean plus the most expensive item; without `equal_counts` it is
    also at most 4/3 - 1/(3 num_ranks) of the optimum. Deterministic; ties go to the lower rank and
    the lower index.

    Args:
        costs: cost of each item [B], finite and not negative, in any unit.
        num_ranks: number of groups, at least 1.
        equal_counts: give every rank the same number of items; B must be divisible by num_ranks.

    Returns:
        One sorted int64 index array per rank; every index appears exactly once. An array can be
        empty only if there are fewer items than ranks.

    Raises:
        ValueError: num_ranks is not positive, a cost is negative or not finite, or B is not
            divisible by num_ranks.
    """
    weights = checked_costs(costs)
    if num_ranks < 1 or (equal_counts and len(weights) % num_ranks):
        raise ValueError(
            "num_ranks must be positive and, with equal_counts, divide the number of items; got "
            f"{len(weights)} items, {num_ranks} ranks"
        )
    # Work on the costs in descending order, so that the result does not depend on the order of the
    # input.
    order = np.argsort(-weights, kind="stable")
    sorted_costs = weights[order]
    owner = np.empty(len(weights), dtype=np.int64)
    owner_sorted = (
        _deal(sorted_costs, num_ranks) if equal_counts else _longest_first(sorted_costs, num_ranks)
    )
    if num_ranks > 1 and len(weights) > num_ranks:
        _exchange(sorted_costs, owner_sorted, num_ranks, moves=not equal_counts)
    owner[order] = owner_sorted
    by_rank = np.argsort(owner, kind="stable")
    return np.split(by_rank, np.cumsum(np.bincount(owner, minlength=num_ranks))[:-1])


def _longest_first(weights: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the rank of each item [B]. Each item, in descending order of cost, is assigned to the
    least loaded rank; ties go to the rank with fewer items, then to the lower rank."""
    owner = []
    heap = [(0.0, 0, rank) for rank in range(num_ranks)]
    for cost in weights.tolist():
        load, count, rank = heap[0]
        owner.append(rank)
        heapq.heapreplace(heap, (load + cost, count + 1, rank))
    return np.array(owner, dtype=np.int64)


def _deal(weights: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the rank of each item [B], with equal counts. Items are dealt out in descending order
    of cost, in rounds of one item per rank. In each round, the most expensive item goes to the
    least loaded rank."""
    loads = [0.0] * num_ranks
    owner: list[int] = []
    # plain Python, because numpy's calls cost more than a round of a few ranks
    for costs in weights.reshape(-1, num_ranks).tolist():
        least_loaded_first = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, cost in zip(least_loaded_first, costs, strict=True):
            loads[rank] += cost
        owner += least_loaded_first
    return np.array(owner, dtype=np.int64)


def _exchange(weights: np.ndarray, owner: np.ndarray, num_ranks: int, *, moves: bool) -> None:
    """Improve `owner` in place: each round swaps items between the most and the least loaded rank,
    the second most and the second least loaded, and so on."""
    loads = np.bincount(owner, weights, num_ranks)
    fruitless = 0
    accepted = loads.mean() * (1 + _ENOUGH)
    for turn in range(_MAX_ROUNDS):
        too_costly = int((loads > accepted).sum())
        if not too_costly or fruitless == _PATIENCE:
            return
        ranks = np.argsort(-loads, kind="stable")
        pairs = min(too_costly, num_ranks // 2)
        # Shift each round, so that a rank without a useful swap gets another partner.
        partners = ranks[::-1][: min(2 * pairs, num_ranks - pairs)]
        done = _trade(weights, owner, loads, ranks[:pairs], np.roll(partners, turn)[:pairs], moves)
        fruitless = 0 if done else fruitless + 1


def _trade(
    weights: np.ndarray,
    owner: np.ndarray,
    loads: np.ndarray,
    high: np.ndarray,
    low: np.ndarray,
    moves: bool,
) -> int:
    """For each pair i, apply the swap of one item of `high[i]` for one of `low[i]` that best evens
    their loads. With `moves`, moving an item without a swap is also allowed. Returns the number of
    swaps applied."""
    pair_of = np.full(len(loads), -1)
    pair_of[high] = pair_of[low] = np.arange(len(high))
    is_low = np.isin(owner, low)
    mine = pair_of[owner]
    give = np.flatnonzero((mine >= 0) & ~is_low)
    take = np.flatnonzero(is_low)
    costs = weights[take]
    pairs = mine[take]
    if moves:  # a one-way move is a swap with a dummy item of cost 0
        costs = np.concatenate([np.zeros(len(low)), costs])
        pairs = np.concatenate([np.arange(len(low)), pairs])
        take = np.concatenate([np.full(len(low), -1), take])
    half = (loads[high] - loads[low]) / 2
    wanted = weights[give] - half[mine[give]]
    nearest, missed = _nearest(pairs, costs, mine[give], wanted, 2.0 * float(weights.max()) + 1.0)
    return _apply(weights, owner, loads, (high, low), half, (give, take[nearest], missed))


def _nearest(
    pairs: np.ndarray, costs: np.ndarray, wanted_pairs: np.ndarray, wanted: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each wanted cost, return the index of the item in the same pair whose cost is nearest,
    and the difference (inf if the pair has no items).

    `step` must exceed the difference between any two costs.
    """
    # Sort all items by pair, then by cost, so that one search serves every pair.
    order = np.lexsort((costs, pairs))
    costs = costs[order]
    pairs = pairs[order]
    right = np.searchsorted(pairs * step + costs, wanted_pairs * step + np.maximum(wanted, 0.0))
    nearest = np.zeros(len(wanted), dtype=np.int64)
    missed = np.full(len(wanted), np.inf)
    for at in (np.maximum(right - 1, 0), np.minimum(right, len(order) - 1)):
        miss = np.where(pairs[at] == wanted_pairs, np.abs(costs[at] - wanted), np.inf)
        nearest = np.where(miss < missed, at, nearest)
        missed = np.minimum(missed, miss)
    return order[nearest], missed


def _apply(
    weights: np.ndarray,
    owner: np.ndarray,
    loads: np.ndarray,
    ranks: tuple[np.ndarray, np.ndarray],
    half: np.ndarray,
    found: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """Apply each pair's best swap if it lowers the load of the more expensive rank. An index of -1
    in `take` means that nothing is swapped back. Returns the number of swaps applied."""
    high, low = ranks
    give, take, missed = found
    order = np.lexsort((give, missed))
    first = np.full(len(loads), -1)
    giver = owner[give[order]]
    ranks_seen, at = np.unique(giver, return_index=True)
    first[ranks_seen] = order[at]
    chosen = first[high]
    useful = (chosen >= 0) & (missed[chosen] < half * (1 - 1e-9))
    high = high[useful]
    low = low[useful]
    chosen = chosen[useful]
    out = give[chosen]
    back = take[chosen]
    gain = weights[out] - np.where(back >= 0, weights[back], 0.0)
    owner[out] = low
    owner[back[back >= 0]] = high[back >= 0]
    loads[high] -= gain
    loads[low] += gain
    return len(chosen)


def shares(tokens: Sequence[int], owed: Mapping[int, int]) -> list[int]:
    """Assign consecutive pieces of work to engines, and return the engine of each piece. Engines
    are filled to the same load one after another, so that consecutive pieces stay together. On idle
    engines, equal pieces are divided as evenly as possible.

    Args:
        tokens: maximum number of tokens of each piece.
        owed: number of tokens that each engine still has to generate.
    """
    load = dict(owed)
    level = _level(sum(tokens), list(owed.values()))
    chosen = []
    for piece in tokens:
        fits = (number for number, tokens_owed in load.items() if tokens_owed + piece / 2 <= level)
        engine = next(fits, None)
        if engine is None:
            engine = min(load, key=lambda number: load[number])
        load[engine] += piece
        chosen.append(engine)
    return chosen


def _level(added: int, owed: Sequence[int]) -> float:
    """Return the common load of the least loaded engines after `added` tokens are distributed,
    always to the least loaded engine.
    """
    loads = sorted(owed)
    heights = [(added + sum(loads[:count])) / count for count in range(1, len(loads) + 1)]
    # over the smallest `count` loads, as long as the next one is below the level
    return next(
        height
        for height, above in zip(heights, [*loads[1:], float("inf")], strict=True)
        if height <= above
    )
