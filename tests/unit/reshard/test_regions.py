"""Rectangles in bulk against element by element counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.reshard import regions as boxes
from hybridflow.reshard.proof import cover_faults

LIMIT = 6
Rects = list[tuple[int, tuple[int, int], tuple[int, int]]]


def rects(max_size: int = 8) -> st.SearchStrategy[Rects]:
    corner = st.tuples(st.integers(0, 3), st.integers(0, 3))
    extent = st.tuples(st.integers(1, 3), st.integers(1, 3))
    return st.lists(st.tuples(st.integers(0, 2), corner, extent), max_size=max_size)


def columns(found: Rects) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    key = np.array([k for k, _, _ in found], dtype=np.int64)
    start, size = (np.array([r[i] for r in found], dtype=np.int64).reshape(-1, 2) for i in (1, 2))
    return key, start, size


def paint(found: Rects) -> np.ndarray:
    """How often each element of each key is covered."""
    grid = np.zeros((3, LIMIT, LIMIT), dtype=int)
    for key, (row, col), (height, width) in found:
        grid[key, row : row + height, col : col + width] += 1
    return grid


@pytest.mark.slow
@given(rects())
def test_overlaps_are_those_that_share_an_element(found: Rects) -> None:
    pairs = {tuple(sorted(pair)) for pair in boxes.overlapping_pairs(*columns(found)).tolist()}
    expected = {
        (i, j)
        for i in range(len(found))
        for j in range(i + 1, len(found))
        if paint([found[i], found[j]]).max() > 1
    }
    assert pairs == expected


@pytest.mark.slow
@given(rects(), rects())
def test_pairs_and_intersections(left: Rects, right: Rects) -> None:
    a = columns(left)
    b = columns(right)
    i, j = boxes.pairs_of_equal_key(a[0], b[0])
    assert {*zip(i.tolist(), j.tolist(), strict=True)} == {
        (x, y) for x, p in enumerate(left) for y, q in enumerate(right) if p[0] == q[0]
    }
    start, size = boxes.intersect(a[1][i], a[2][i], b[1][j], b[2][j])
    for row, (x, y) in enumerate(zip(i.tolist(), j.tolist(), strict=True)):
        shared = (paint([left[x]]) * paint([right[y]])).sum()
        assert shared == np.prod(np.maximum(size[row], 0))
        assert (
            shared == 0
            or (paint([left[x]]) * paint([right[y]]))[left[x][0], start[row, 0], start[row, 1]] == 1
        )


@pytest.mark.slow
@given(rects())
def test_disjoint_parts_cover_the_same(found: Rects) -> None:
    key, start, size = columns(found)
    owner, part_start, part_size = boxes.make_disjoint(key, start, size)
    parts: Rects = [
        (int(key[o]), (int(s[0]), int(s[1])), (int(n[0]), int(n[1])))
        for o, s, n in zip(owner, part_start, part_size, strict=True)
    ]
    assert np.array_equal(paint(parts), np.minimum(paint(found), 1))
    for o, part in zip(owner.tolist(), parts, strict=True):
        assert (paint([found[o]]) >= paint([part])).all()


@given(rects(2))
def test_subtraction(found: Rects) -> None:
    if len(found) == 2:
        (_, *box), (_, *cut) = found
        rest: Rects = [
            (0, start, size) for start, size in boxes.subtract((box[0], box[1]), (cut[0], cut[1]))
        ]  # type: ignore[misc]
        expected = np.maximum(paint([(0, *box)])[0] - paint([(0, *cut)])[0], 0)
        assert np.array_equal(paint(rest)[0], expected)


@pytest.mark.slow
@given(rects(5), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_cover_faults_agree_with_counting(found: Rects, shape: tuple[int, int]) -> None:
    bounds = np.array([shape] * 3, dtype=np.int64)
    faulty = {fault.key for fault in cover_faults(*columns(found), bounds)}
    wanted = np.zeros((3, LIMIT, LIMIT), dtype=int)
    wanted[:, : shape[0], : shape[1]] = 1
    painted = paint(found)
    assert faulty == {key for key in range(3) if not np.array_equal(painted[key], wanted[key])}


def test_faults_say_what_is_wrong() -> None:
    key = np.array([0, 0, 1, 2])
    bounds = np.array([[4, 1], [4, 1], [4, 1]])
    start = np.array([[0, 0], [1, 0], [0, 0], [2, 0]])
    size = np.array([[2, 1], [3, 1], [3, 1], [4, 1]])
    faults = cover_faults(key, start, size, bounds)
    assert {(f.key, f.kind, f.elements) for f in faults} == {
        (0, "overlap", 1),
        (1, "missing", 1),
        (2, "beyond", 0),
    }


@pytest.mark.parametrize("counts", [[], [0], [2, 0, 3]])
def test_ranges(counts: list[int]) -> None:
    assert boxes.ranges(np.array(counts, dtype=np.int64)).tolist() == [
        i for count in counts for i in range(count)
    ]
