"""Vectorised operations on axis-parallel rectangles: intersection, subtraction, overlaps.

The planner uses these functions. The proof of a plan deliberately uses none of them.

A set of N rectangles is two int64 arrays `[N, D]`, `start` and `size`. A third array `key` `[N]`
identifies the containing tensor or buffer; only rectangles with equal keys can intersect. A plan
for a model with 10^12 parameters contains about 10^5 rectangles.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def volumes(size: Array) -> Array:
    """Return the number of elements of each rectangle `[N]`."""
    return np.prod(size, axis=1, dtype=np.int64)


def ranges(counts: Array) -> Array:
    """Return the concatenation of `[0..counts[0])`, `[0..counts[1])`, ..."""
    first = np.cumsum(counts) - counts
    first_of_each = np.repeat(first, counts)
    return np.arange(len(first_of_each), dtype=np.int64) - first_of_each


def pairs_of_equal_key(left: Array, right: Array) -> tuple[Array, Array]:
    """Return all index pairs (i, j) with `left[i] == right[j]`."""
    order = np.argsort(right, kind="stable")
    sorted_right = right[order]
    first = np.searchsorted(sorted_right, left, side="left")
    end = np.searchsorted(sorted_right, left, side="right")
    counts = end - first
    i = np.repeat(np.arange(len(left)), counts)
    place = np.repeat(first, counts) + ranges(counts)
    return i, order[place]


def intersect(start_a: Array, size_a: Array, start_b: Array, size_b: Array) -> tuple[Array, Array]:
    """Intersect two sets row by row. An empty intersection has a size of zero or less on some
    axis."""
    start = np.maximum(start_a, start_b)
    end = np.minimum(start_a + size_a, start_b + size_b)
    return start, end - start


def overlapping_pairs(key: Array, start: Array, size: Array) -> Array:
    """Return index pairs `[P, 2]` of rectangles with equal keys that share an element.

    Rectangles are sorted by (key, start along the key's most divided axis), so a rectangle can only
    overlap later rectangles that start before it ends.
    """
    if len(key) < 2:
        return np.empty((0, 2), dtype=np.int64)
    _, compact = np.unique(key, return_inverse=True)
    compact = compact.astype(np.int64)
    span = int((start + size).max()) + 1
    # Stacks of matrices and fused matrices are divided along different axes. With a single axis for
    # all keys, the number of candidate pairs would grow quadratically.
    distinct = []
    offset = compact * span
    for starts in start.T:
        codes = np.unique(offset + starts)
        distinct.append(np.bincount(codes // span))
    axis = np.argmax(distinct, axis=0)[compact]
    rows = np.arange(len(key))
    low = offset + start[rows, axis]
    order = np.argsort(low, kind="stable")
    low_sorted = low[order]
    end = low_sorted + size[order, axis[order]]
    candidates_end = np.searchsorted(low_sorted, end, side="left")
    counts = np.maximum(candidates_end - rows - 1, 0)
    i = np.repeat(rows, counts)
    j = i + 1 + ranges(counts)
    a = order[i]
    b = order[j]
    _, shared = intersect(start[a], size[a], start[b], size[b])
    meets = (shared > 0).all(axis=1)
    return np.stack([a[meets], b[meets]], axis=1)


def group_rows(matrix: Array) -> tuple[Array, Array]:
    """Group equal rows of `[N, C]`. Returns (index of each group's first row, group of each row).

    Groups are in lexicographic order.
    """
    order = np.lexsort(matrix.T[::-1])
    ordered = matrix[order]
    is_new = np.ones(len(order), dtype=bool)
    differs = ordered[1:] != ordered[:-1]
    is_new[1:] = differs.any(axis=1)
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(is_new) - 1
    return order[is_new], group


Box = tuple[tuple[int, ...], tuple[int, ...]]


def subtract(box: Box, cut: Box) -> list[Box]:
    """Return `box` minus `cut` as disjoint boxes (start, size)."""
    meets = []
    for a, n, c, m in zip(*box, *cut, strict=True):
        low = max(a, c)
        high = min(a + n, c + m)
        if low >= high:
            return [box]
        meets.append((low, high))
    rest: list[Box] = []
    start = list(box[0])
    size = list(box[1])
    for axis, (low, high) in enumerate(meets):
        first = start[axis]
        end = first + size[axis]
        for begin, stop in ((first, low), (high, end)):
            if begin < stop:
                start[axis] = begin
                size[axis] = stop - begin
                rest.append((tuple(start), tuple(size)))
        start[axis] = low
        size[axis] = high - low
    return rest


def make_disjoint(key: Array, start: Array, size: Array) -> tuple[Array, Array, Array]:
    """Split rectangles so that they cover the same elements without overlap. Returns (original
    rectangle's index, start, size) of each part.

    An element in several rectangles is assigned to the first of them. Rectangles without overlaps
    are returned unchanged.
    """
    pairs = overlapping_pairs(key, start, size)
    earlier: dict[int, list[int]] = {}
    for a, b in np.sort(pairs, axis=1).tolist():
        earlier.setdefault(b, []).append(a)
    plain = np.setdiff1d(np.arange(len(key)), list(earlier))
    owners = [plain]
    starts = [start[plain]]
    sizes = [size[plain]]

    def box_of(index: int) -> Box:
        box_start = start[index].tolist()
        box_size = size[index].tolist()
        return tuple(box_start), tuple(box_size)

    for index, cuts in earlier.items():
        boxes = [box_of(index)]
        for cut in cuts:
            other = box_of(cut)
            boxes = [part for box in boxes for part in subtract(box, other)]
        if boxes:
            table = np.array(boxes, dtype=np.int64)
            owners.append(np.full(len(boxes), index))
            starts.append(table[:, 0])
            sizes.append(table[:, 1])
    return np.concatenate(owners), np.concatenate(starts), np.concatenate(sizes)
