import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.balancing import SequenceCost
from hybridflow.data.packing import (
    _split_to,
    balance,
    balanced_order,
    pack,
    pack_alike,
    update_order,
)
from hybridflow.errors import ConfigError

BUDGET = 100
lengths = st.lists(st.integers(1, BUDGET), max_size=60)


def _sums(groups: list[np.ndarray], sizes) -> list[int]:
    return [int(np.asarray(sizes)[group].sum()) for group in groups]


def _best_largest_sum(costs: list[int], ranks: int) -> int:
    return min(
        max(
            sum(c for c, r in zip(costs, owners, strict=True) if r == rank) for rank in range(ranks)
        )
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )


@pytest.mark.slow
@given(lengths, st.integers(1, 9))
def test_each_index_once_no_bin_empty_or_above_the_budget(sizes, min_bins):
    bins = pack(sizes, BUDGET, min_bins=min_bins)
    assert sorted(np.concatenate([*bins, []]).tolist()) == list(range(len(sizes)))
    assert all(0 < total <= BUDGET for total in _sums(bins, sizes))
    assert all((np.diff(members) > 0).all() for members in bins)


@pytest.mark.slow
@given(lengths, st.integers(1, 9))
def test_number_of_bins_follows_min_bins(sizes, min_bins):
    plain = len(pack(sizes, BUDGET))
    assert len(pack(sizes, BUDGET, min_bins=min_bins)) == max(plain, min(min_bins, len(sizes)))


@given(lengths)
def test_no_two_bins_are_half_empty(sizes):
    # No fewer than the tokens fill; and never two bins that are both at most half full, or the
    # second would have gone into the first.
    bins = pack(sizes, BUDGET)
    assert len(bins) >= -(-sum(sizes) // BUDGET)
    assert len(bins) <= 2 * sum(sizes) / BUDGET + 1


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=6))
def test_best_fit_decreasing_bound_where_the_optimum_is_known(full_bins):
    # Each list is topped up to exactly one budget, so the optimum is the number of lists.
    filled = [[*part, BUDGET - sum(part)] for part in full_bins if sum(part) < BUDGET]
    sizes = [size for part in filled for size in part]
    assert len(pack(sizes, BUDGET)) <= 11 / 9 * len(filled) + 6 / 9


@pytest.mark.slow
@given(lengths, st.randoms())
def test_the_plan_is_deterministic_and_the_order_does_not_change_its_size(sizes, random):
    once = pack(sizes, BUDGET, min_bins=3)
    again = pack(np.array(sizes, dtype=np.int32), BUDGET, min_bins=3)
    assert [b.tolist() for b in once] == [b.tolist() for b in again]
    shuffled = list(sizes)
    random.shuffle(shuffled)
    assert len(pack(shuffled, BUDGET)) == len(pack(sizes, BUDGET))


def test_lengths_are_evened_out_when_the_budget_allows():
    assert sorted(_sums(pack([60, 30, 30, 20, 20], BUDGET), [60, 30, 30, 20, 20])) == [80, 80]


def test_where_even_loads_break_the_budget_bins_are_halved_and_a_bin_of_one_sequence_is_not():
    bins = _split_to(
        [np.array([0]), np.array([1, 2]), np.array([3, 4, 5])], np.array([20, 9, 9, 6, 6, 6]), 5
    )
    assert sorted(members.tolist() for members in bins) == [[0], [1], [2], [3, 5], [4]]


def test_nothing_to_pack_gives_no_bins():
    assert pack([], BUDGET, min_bins=4) == []


def test_a_sequence_above_the_budget_is_named():
    with pytest.raises(
        ConfigError, match=r"sequence 1 has 101 tokens.*100.*max_tokens_per_micro_batch"
    ):
        pack([5, 101, 7], BUDGET)


@pytest.mark.parametrize("arguments", [{"lengths": [0]}, {"lengths": [3], "min_bins": 0}])
def test_arguments_that_are_not_positive_are_refused(arguments):
    with pytest.raises(ValueError, match="positive"):
        pack(arguments.pop("lengths"), BUDGET, **arguments)


@pytest.mark.slow
@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_balance_covers_each_index_once_within_mean_plus_dearest(costs, ranks):
    groups = balance(costs, ranks)
    assert len(groups) == ranks
    assert sorted(np.concatenate([*groups, []]).tolist()) == list(range(len(costs)))
    loads = [float(np.asarray(costs)[group].sum()) for group in groups]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) + 1e-6 * (1 + sum(costs))
    assert len(costs) < ranks or all(len(group) for group in groups)


@pytest.mark.slow
@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_balance_with_equal_counts_keeps_them_and_its_bound(rows, seed):
    costs = np.random.default_rng(seed).permutation(np.concatenate(rows))
    groups = balance(costs, 3, equal_counts=True)
    assert [len(group) for group in groups] == [len(costs) // 3] * 3
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(costs)))
    assert max(
        float(costs[group].sum()) for group in groups
    ) <= costs.sum() / 3 + costs.max() + 1e-6 * (1 + costs.sum())


def test_exchanges_bring_many_ranks_closer_than_the_greedy_start():
    costs = np.random.default_rng(0).lognormal(7, 0.5, 4096).astype(int)
    for equal in (False, True):
        loads = np.array(_sums(balance(costs, 256, equal_counts=equal), costs))
        assert loads.max() / loads.mean() <= 1.0015


def test_balance_with_equal_counts_refuses_what_does_not_divide():
    with pytest.raises(ValueError, match="divide"):
        balance([1.0] * 7, 3, equal_counts=True)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 7))
def test_balanced_order_is_a_permutation_whose_consecutive_pieces_are_balanced(costs, ranks):
    order = balanced_order(costs, ranks)
    assert sorted(order.tolist()) == list(range(len(costs)))
    size = -(-len(costs) // ranks)
    pieces = [np.asarray(costs)[order[i : i + size]].sum() for i in range(0, len(costs), size)]
    assert max(pieces) <= sum(costs) / (len(costs) // size) + max(costs) + 1e-9


@pytest.mark.slow
@given(st.lists(st.integers(1, 500), min_size=48, max_size=48), st.integers(0, 9))
def test_every_layout_draws_the_same_rows_for_each_update(costs, seed):
    def updates(ranks):
        order = update_order(costs, ranks, 12, (seed, 0))
        assert sorted(order.tolist()) == list(range(48))
        # a rank's piece: its share of each of the four updates
        shares = order.reshape(ranks, 4, 12 // ranks)
        heaviest = np.asarray(costs)[shares].sum(-1).max(0)
        assert (heaviest <= np.asarray(costs)[shares].sum((0, 2)) / ranks + max(costs)).all()
        return [set(shares[:, number].reshape(-1).tolist()) for number in range(4)]

    assert updates(1) == updates(2) == updates(4)
    one = update_order(costs, 1, 12, (seed, 0))
    assert one.tolist() == np.random.default_rng([seed, 0]).permutation(48).tolist()
    assert one.tolist() != update_order(costs, 1, 12, (seed, 1)).tolist()
    with pytest.raises(ValueError, match="cannot be split into updates"):
        update_order(costs, 5, 12, (seed, 0))


@pytest.mark.slow
@given(st.lists(st.integers(1, 500), min_size=8, max_size=40, unique=True), st.randoms())
def test_the_pieces_hold_the_same_sequences_whatever_order_they_come_in(costs, random):
    costs = costs[: len(costs) // 4 * 4]
    shuffled = list(costs)
    random.shuffle(shuffled)
    pieces = [
        sorted(map(tuple, np.sort(np.asarray(c)[balanced_order(c, 4)].reshape(4, -1)).tolist()))
        for c in (costs, shuffled)
    ]
    assert pieces[0] == pieces[1]


@pytest.mark.slow
@given(st.lists(lengths, min_size=1, max_size=4))
def test_every_rank_gets_the_same_number_of_micro_batches(by_rank):
    most = max(len(pack(sizes, BUDGET)) for sizes in by_rank)
    asked: list[int] = []
    plans = [pack_alike(sizes, BUDGET, lambda own: asked.append(own) or most) for sizes in by_rank]
    assert asked == [len(pack(sizes, BUDGET)) for sizes in by_rank]
    assert {len(plan) for plan in plans} == {most}
    for plan, sizes in zip(plans, by_rank, strict=True):
        assert sorted(np.concatenate([*plan, []]).tolist()) == list(range(len(sizes)))
        assert all(total <= BUDGET for total in _sums(plan, sizes))


def test_long_sequences_cost_more_than_their_tokens():
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    cost = SequenceCost.of_model(shape)
    one, two = cost(np.array([1000, 2000]))
    assert two > 2 * one > 2000
    tokens = 2 * (64 * 16 * (4 + 4) * 2 + 3 * 64 * 128) + 64 * 100
    pairs = 2 * 64
    assert (cost.per_token, cost.per_pair) == (tokens, pairs)
    assert SequenceCost.of_model({})(np.array([3, 5])).tolist() == [3.0, 5.0]
    moe = SequenceCost.of_model(
        {**shape, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    )
    assert moe.per_token == 2 * (64 * 16 * (4 + 4) * 2 + 3 * 64 * 64 + 64 * 8) + 64 * 100


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_is_within_its_bound_of_the_optimum(costs, ranks):
    bound = 4 / 3 - 1 / (3 * ranks)
    assert (
        max(_sums(balance(costs, ranks), costs)) <= bound * _best_largest_sum(costs, ranks) + 1e-9
    )


def test_balance_of_equal_costs_gives_equal_counts():
    assert [len(group) for group in balance([0.0] * 12, 4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [float("inf")], [-1.0]])
def test_balance_refuses_costs_that_are_no_costs(costs):
    with pytest.raises(ValueError, match="finite"):
        balance(costs, 2)
