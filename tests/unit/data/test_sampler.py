import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.data.sampler import ResumableSampler
from hybridflow.errors import CheckpointError

shapes = st.tuples(st.integers(1, 23), st.integers(1, 40), st.booleans(), st.integers(0, 5))


def _stream(sampler: ResumableSampler, batches: int) -> list[list[int]]:
    return [next(sampler).tolist() for _ in range(batches)]


@pytest.mark.slow
@given(shapes)
def test_every_row_comes_once_an_epoch_and_no_row_is_skipped(shape):
    num_rows, batch_size, shuffle, seed = shape
    batches = _stream(ResumableSampler(num_rows, batch_size, shuffle, seed), 3 * num_rows)
    assert all(len(batch) == batch_size for batch in batches)
    stream = np.concatenate(batches)
    whole_epochs = len(stream) // num_rows
    assert whole_epochs >= 3
    for epoch in range(whole_epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows].tolist()) == list(
            range(num_rows)
        )


@pytest.mark.slow
@given(shapes)
@settings(max_examples=60)
def test_killed_at_any_batch_the_sequence_equals_the_uninterrupted_one(shape):
    num_rows, batch_size, shuffle, seed = shape
    total = 2 * (num_rows // batch_size) + 4  # beyond two epochs, boundaries included
    whole = _stream(ResumableSampler(num_rows, batch_size, shuffle, seed), total)
    for killed_after in range(total + 1):
        first = ResumableSampler(num_rows, batch_size, shuffle, seed)
        before = _stream(first, killed_after)
        second = ResumableSampler(num_rows, batch_size, shuffle, seed)
        second.restore(json.loads(json.dumps(first.state())))
        assert second.position == first.position
        assert before + _stream(second, total - killed_after) == whole


def test_the_state_after_the_last_batch_of_an_epoch_starts_the_next_epoch():
    first = ResumableSampler(8, 4, seed=3)
    _stream(first, 2)
    assert first.position == 8
    second = ResumableSampler(8, 4, seed=3)
    second.restore(first.state())
    assert sorted(np.concatenate(_stream(second, 2)).tolist()) == list(range(8))


def test_rows_left_over_open_the_next_epoch():
    sampler = ResumableSampler(5, 3, shuffle=False)
    assert _stream(sampler, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_the_order_depends_on_the_seed_and_on_the_epoch():
    one = ResumableSampler(50, 50, seed=1)
    two = ResumableSampler(50, 50, seed=2)
    first, second = _stream(one, 2)
    assert first != second
    assert first != next(two).tolist()


def test_the_batch_size_may_change_on_resume():
    first = ResumableSampler(10, 4, seed=5)
    taken = np.concatenate(_stream(first, 1))
    second = ResumableSampler(10, 6, seed=5)
    second.restore(first.state())
    assert sorted([*taken, *next(second)]) == list(range(10))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (ResumableSampler(11, 4, seed=1), "rows in the dataset was 10 .* is 11"),
        (ResumableSampler(10, 4, seed=2), "seed was 1 .* is 2"),
        (ResumableSampler(10, 4, shuffle=False, seed=1), "shuffle was True .* is False"),
    ],
)
def test_a_state_of_another_dataset_or_seed_is_refused(other, named):
    first = ResumableSampler(10, 4, seed=1)
    next(first)
    with pytest.raises(CheckpointError, match=named):
        other.restore(first.state())
    assert other.position == 0


@pytest.mark.parametrize("state", [{}, {"position": -1}, {"position": "3"}, {"position": True}])
def test_a_malformed_state_is_refused(state):
    with pytest.raises(CheckpointError, match="position"):
        ResumableSampler(10, 4).restore(state)


def test_a_caller_cannot_change_the_order_by_writing_into_a_batch():
    sampler = ResumableSampler(4, 4, shuffle=False)
    next(sampler)[:] = 99
    sampler.position = 0
    assert next(sampler).tolist() == [0, 1, 2, 3]


def _kinds(num_rows: int, seed: int) -> list[dict[str, np.ndarray | None]]:
    random = np.random.default_rng(seed)
    weights = random.random(num_rows) + 0.1
    difficulty = random.integers(0, 4, num_rows)
    return [
        {"weights": weights},
        {"difficulty": difficulty},
        {"weights": weights, "difficulty": difficulty},
    ]


@pytest.mark.slow
@given(shapes)
@settings(max_examples=30)
def test_weighted_and_sorted_orders_resume_at_every_batch_of_two_epochs(shape):
    num_rows, batch_size, shuffle, seed = shape
    for kind in _kinds(num_rows, seed):
        total = 2 * (num_rows // batch_size) + 3
        whole = _stream(ResumableSampler(num_rows, batch_size, shuffle, seed, **kind), total)
        for killed_after in range(total + 1):
            first = ResumableSampler(num_rows, batch_size, shuffle, seed, **kind)
            before = _stream(first, killed_after)
            second = ResumableSampler(num_rows, batch_size, shuffle, seed, **kind)
            second.restore(json.loads(json.dumps(first.state())))
            assert before + _stream(second, total - killed_after) == whole


@pytest.mark.slow
@given(st.lists(st.floats(0, 10), min_size=1, max_size=30).filter(any), st.integers(0, 5))
def test_a_row_comes_as_often_as_its_weight_says_rounded(weights, seed):
    num_rows = len(weights)
    epoch = next(ResumableSampler(num_rows, num_rows, seed=seed, weights=np.array(weights)))
    expected = np.array(weights) * num_rows / np.sum(weights)
    counts = np.bincount(epoch, minlength=num_rows)
    assert counts.sum() == num_rows
    assert (np.abs(counts - expected) < 1 + 1e-6).all()


def test_a_curriculum_goes_from_easy_to_hard_and_shuffles_within():
    difficulty = np.array([2, 0, 1, 0, 2, 1, 0, 0])
    sampler = ResumableSampler(8, 8, seed=1, difficulty=difficulty)
    one, two = _stream(sampler, 2)
    assert difficulty[one].tolist() == difficulty[two].tolist() == sorted(difficulty.tolist())
    assert one != two


def test_a_state_taken_under_other_weights_is_refused():
    first = ResumableSampler(4, 2, weights=np.array([1.0, 2, 3, 4]))
    for other in (ResumableSampler(4, 2), ResumableSampler(4, 2, weights=np.array([1.0, 2, 3, 5]))):
        with pytest.raises(CheckpointError, match="weights or difficulty"):
            other.restore(first.state())


@pytest.mark.parametrize(
    "kind",
    [
        {"weights": np.zeros(3)},
        {"weights": np.array([1, -1, 1])},
        {"difficulty": np.array([1, np.nan, 0])},
    ],
)
def test_weights_and_difficulties_that_are_none_are_refused(kind):
    with pytest.raises(ValueError, match=r"weights|difficulty"):
        ResumableSampler(3, 1, **kind)
