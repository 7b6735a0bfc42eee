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


@given(shapes)
def test_every_row_comes_once_an_epoch_and_no_row_is_skipped(shape):
    num_rows, batch_size, shuffle, seed = shape
    batches = _stream(ResumableSampler(num_rows, batch_size, shuffle, seed), 3 * num_rows)
    assert all(len(batch) == batch_size for batch in batches)
    stream = np.concatenate(batches)
    whole_epochs = len(stream) // num_rows
    assert whole_epochs >= 3
    for epoch in range(whole_epochs):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows].tolist()) == list(range(num_rows))


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
        assert second.epoch == first.epoch
        assert before + _stream(second, total - killed_after) == whole


def test_the_state_after_the_last_batch_of_an_epoch_starts_the_next_epoch():
    first = ResumableSampler(8, 4, seed=3)
    _stream(first, 2)
    assert first.epoch == 1
    second = ResumableSampler(8, 4, seed=3)
    second.restore(first.state())
    assert sorted(np.concatenate(_stream(second, 2)).tolist()) == list(range(8))


def test_rows_left_over_open_the_next_epoch():
    sampler = ResumableSampler(5, 3, shuffle=False)
    assert _stream(sampler, 4) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_the_order_depends_on_the_seed_and_on_the_epoch():
    one, two = ResumableSampler(50, 50, seed=1), ResumableSampler(50, 50, seed=2)
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
