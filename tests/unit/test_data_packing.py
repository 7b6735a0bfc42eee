import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.packing import balance, pack
from hybridflow.errors import ConfigError

BUDGET = 100
lengths = st.lists(st.integers(1, BUDGET), max_size=60)


def _sums(groups: list[np.ndarray], sizes) -> list[int]:
    return [int(np.asarray(sizes)[group].sum()) for group in groups]


def _best_largest_sum(costs: list[int], ranks: int) -> int:
    return min(
        max(sum(c for c, r in zip(costs, owners, strict=True) if r == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )


@given(lengths, st.integers(1, 9), st.integers(1, 5))
def test_each_index_once_no_bin_empty_or_above_the_budget(sizes, min_bins, multiple_of):
    bins = pack(sizes, BUDGET, min_bins=min_bins, multiple_of=multiple_of)
    assert sorted(np.concatenate([*bins, []]).tolist()) == list(range(len(sizes)))
    assert all(0 < total <= BUDGET for total in _sums(bins, sizes))
    assert all((np.diff(members) > 0).all() for members in bins)


@given(lengths, st.integers(1, 9), st.integers(1, 5))
def test_number_of_bins_follows_min_bins_and_multiple_of(sizes, min_bins, multiple_of):
    plain = len(pack(sizes, BUDGET))
    number = len(pack(sizes, BUDGET, min_bins=min_bins, multiple_of=multiple_of))
    floor = max(plain, min(min_bins, len(sizes)))
    rounded = -(-floor // multiple_of) * multiple_of
    assert number == (rounded if rounded <= len(sizes) else floor)


@given(lengths)
def test_no_two_bins_are_half_empty(sizes):
    # No fewer than the tokens fill; and never two bins that are both at most half full, or the second would have gone into the first.
    bins = pack(sizes, BUDGET)
    assert len(bins) >= -(-sum(sizes) // BUDGET)
    assert len(bins) <= 2 * sum(sizes) / BUDGET + 1


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=6))
def test_first_fit_decreasing_bound_where_the_optimum_is_known(full_bins):
    # Each list is topped up to exactly one budget, so the optimum is the number of lists.
    filled = [[*part, BUDGET - sum(part)] for part in full_bins if sum(part) < BUDGET]
    sizes = [size for part in filled for size in part]
    assert len(pack(sizes, BUDGET)) <= 11 / 9 * len(filled) + 6 / 9


@given(lengths, st.randoms())
def test_the_plan_is_deterministic_and_the_order_does_not_change_its_size(sizes, random):
    once, again = pack(sizes, BUDGET, min_bins=3), pack(np.array(sizes, dtype=np.int32), BUDGET, min_bins=3)
    assert [b.tolist() for b in once] == [b.tolist() for b in again]
    shuffled = list(sizes)
    random.shuffle(shuffled)
    assert len(pack(shuffled, BUDGET)) == len(pack(sizes, BUDGET))


def test_lengths_are_evened_out_when_the_budget_allows():
    assert sorted(_sums(pack([60, 30, 30, 20, 20], BUDGET), [60, 30, 30, 20, 20])) == [80, 80]


def test_a_bin_with_one_sequence_is_not_split_where_even_loads_would_break_the_budget():
    # Spread evenly over 9 bins these lengths exceed 20 tokens, though 8 bins hold them; the fullest bin holds one sequence alone.
    sizes = [7, 6, 10, 10, 8, 7, 8, 9, 7, 9, 6, 9, 7, 6, 6, 7, 8, 20]
    assert max(_sums(balance(sizes, 9), sizes)) > 20
    bins = pack(sizes, 20, min_bins=9)
    assert (len(bins), max(_sums(bins, sizes))) == (9, 20)


def test_nothing_to_pack_gives_no_bins():
    assert pack([], BUDGET, min_bins=4, multiple_of=2) == []


def test_a_sequence_above_the_budget_is_named():
    with pytest.raises(ConfigError, match=r"sequence 1 has 101 tokens.*100.*max_tokens_per_micro_batch"):
        pack([5, 101, 7], BUDGET)


@pytest.mark.parametrize("arguments", [{"lengths": [0]}, {"lengths": [3], "min_bins": 0}, {"lengths": [3], "multiple_of": 0}])
def test_arguments_that_are_not_positive_are_refused(arguments):
    with pytest.raises(ValueError, match="positive"):
        pack(arguments.pop("lengths"), BUDGET, **arguments)


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9))
def test_balance_covers_each_index_once_within_mean_plus_dearest(costs, ranks):
    groups = balance(costs, ranks)
    assert len(groups) == ranks
    assert sorted(np.concatenate([*groups, []]).tolist()) == list(range(len(costs)))
    loads = [float(np.asarray(costs)[group].sum()) for group in groups]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) + 1e-6 * (1 + sum(costs))
    assert len(costs) < ranks or all(len(group) for group in groups)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_is_within_its_bound_of_the_optimum(costs, ranks):
    bound = 4 / 3 - 1 / (3 * ranks)
    assert max(_sums(balance(costs, ranks), costs)) <= bound * _best_largest_sum(costs, ranks) + 1e-9


def test_balance_of_equal_costs_gives_equal_counts():
    assert [len(group) for group in balance([0.0] * 12, 4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("costs", [[1.0, float("nan")], [float("inf")], [-1.0]])
def test_balance_refuses_costs_that_are_no_costs(costs):
    with pytest.raises(ValueError, match="finite"):
        balance(costs, 2)
