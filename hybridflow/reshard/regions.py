"""Axis-parallel rectangles in bulk: intersection, subtraction, overlaps. The planner cuts with these; the proof of a
plan uses none of them.

A set of N rectangles is two int64 arrays `[N, D]`, `start` and `size`; a third array `key` `[N]` says what each lies in
(a tensor, a buffer), and only rectangles of equal key meet. Everything is vectorised: a plan for a model of 10^12
parameters has some 10^5 rectangles.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def volumes(size: Array) -> Array:
    """Number of elements of each rectangle `[N]`."""
    return np.prod(size, axis=1, dtype=np.int64)


def ranges(counts: Array) -> Array:
    """`[0..counts[0]), [0..counts[1]), ...` one after another."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)


def pairs_of_equal_key(left: Array, right: Array) -> tuple[Array, Array]:
    """Index pairs (i, j) with `left[i] == right[j]`, all of them."""
    order = np.argsort(right, kind="stable")
    sorted_right = right[order]
    first = np.searchsorted(sorted_right, left, side="left")
    counts = np.searchsorted(sorted_right, left, side="right") - first
    i = np.repeat(np.arange(len(left)), counts)
    return i, order[np.repeat(first, counts) + ranges(counts)]


def intersect(start_a: Array, size_a: Array, start_b: Array, size_b: Array) -> tuple[Array, Array]:
    """Row-wise intersection; where two do not meet, some size is zero or less."""
    start = np.maximum(start_a, start_b)
    return start, np.minimum(start_a + size_a, start_b + size_b) - start


def overlapping_pairs(key: Array, start: Array, size: Array) -> Array:
    """Index pairs `[P, 2]` of rectangles of equal key that share an element.

    Sorted by (key, start along the key's most divided axis), a rectangle can only meet those that follow before its own
    end.
    """
    if len(key) < 2:
        return np.empty((0, 2), dtype=np.int64)
    _, compact = np.unique(key, return_inverse=True)
    compact = compact.astype(np.int64)
    span = int((start + size).max()) + 1
    # a stack of matrices is divided along another axis than a fused one: with one axis for all, pairs would grow with
    # the square
    distinct = [np.bincount(np.unique(compact * span + start[:, d]) // span) for d in range(start.shape[1])]
    axis = np.argmax(distinct, axis=0)[compact]
    rows = np.arange(len(key))
    low = compact * span + start[rows, axis]
    order = np.argsort(low, kind="stable")
    low_sorted = low[order]
    end = low_sorted + size[order, axis[order]]
    counts = np.maximum(np.searchsorted(low_sorted, end, side="left") - np.arange(len(order)) - 1, 0)
    i = np.repeat(np.arange(len(order)), counts)
    j = i + 1 + ranges(counts)
    a, b = order[i], order[j]
    _, shared = intersect(start[a], size[a], start[b], size[b])
    meets = (shared > 0).all(axis=1)
    return np.stack([a[meets], b[meets]], axis=1)


def group_rows(matrix: Array) -> tuple[Array, Array]:
    """Equal rows of `[N, C]`: (index of the first of each group, group of each row); groups are in lexicographic
    order."""
    order = np.lexsort(matrix.T[::-1])
    ordered = matrix[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(is_new) - 1
    return order[is_new], group


Box = tuple[tuple[int, ...], tuple[int, ...]]


def subtract(box: Box, cut: Box) -> list[Box]:
    """`box` without `cut`, as disjoint boxes (start, size)."""
    meets = [(max(a, c), min(a + n, c + m)) for a, n, c, m in zip(box[0], box[1], cut[0], cut[1], strict=True)]
    if any(low >= high for low, high in meets):
        return [box]
    rest: list[Box] = []
    start, size = list(box[0]), list(box[1])
    for axis, (low, high) in enumerate(meets):
        end = start[axis] + size[axis]
        for begin, stop in ((start[axis], low), (high, end)):
            if begin < stop:
                rest.append(
                    (
                        (*start[:axis], begin, *start[axis + 1 :]),
                        (*size[:axis], stop - begin, *size[axis + 1 :]),
                    )
                )
        start[axis], size[axis] = low, high - low
    return rest


def make_disjoint(key: Array, start: Array, size: Array) -> tuple[Array, Array, Array]:
    """Parts of the rectangles that cover the same elements without overlap: (index of the rectangle, start, size).

    An element of several rectangles stays with the first. Rectangles that meet nothing come back as they are.
    """
    pairs = overlapping_pairs(key, start, size)
    earlier: dict[int, list[int]] = {}
    for a, b in np.sort(pairs, axis=1).tolist():
        earlier.setdefault(b, []).append(a)
    plain = np.setdiff1d(np.arange(len(key)), np.fromiter(earlier, dtype=np.int64, count=len(earlier)))
    owners, starts, sizes = [plain], [start[plain]], [size[plain]]
    for index, cuts in earlier.items():
        boxes: list[Box] = [(tuple(start[index].tolist()), tuple(size[index].tolist()))]
        for cut in cuts:
            other: Box = (tuple(start[cut].tolist()), tuple(size[cut].tolist()))
            boxes = [part for box in boxes for part in subtract(box, other)]
        if boxes:
            owners.append(np.full(len(boxes), index))
            starts.append(np.array([box[0] for box in boxes], dtype=np.int64))
            sizes.append(np.array([box[1] for box in boxes], dtype=np.int64))
    return np.concatenate(owners), np.concatenate(starts), np.concatenate(sizes)
