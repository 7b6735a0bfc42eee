"""Proves a slice plan before any transfer, using only the plan's data and none of the planner's
code.

The proof shows that:

- every element of every engine buffer is written exactly once or is declared padding;
- every slice is within one region that its sender holds;
- every engine rank of a class receives each delivery exactly once;
- every HF tensor is fully used by every engine, or listed as unused;
- fused tensors are sent in one bucket, and no bucket exceeds its limit;
- senders hold all blocks from which they compute fp8 weights and scales, and an engine that loads a
  weight in fp8 also loads its scales.

Exact coverage of a box by rectangles is shown with signed corners (`cover_faults`), whereas the
planner intersects and subtracts rectangles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models.fp8 import FP8
from hybridflow.reshard.layout import PADDING, Catalog, Layout, padded
from hybridflow.reshard.slices import SlicePlan

Array = np.ndarray
_SHOWN = 5
_CASTS = ("float32", "bfloat16", "float16")  # dtypes that senders can cast between


@dataclass(frozen=True)
class Proof:
    """Result of a proof.

    Attributes:
        slices, elements, padding: number of slices, target elements and padding elements.
        unused: HF tensors that no engine uses.
        digest: the plan's hash.
    """

    slices: int
    elements: int
    padding: int
    unused: tuple[str, ...]
    digest: str


def prove(plan: SlicePlan, allow_unused: Collection[str] = ()) -> Proof:
    """Check the plan.

    Args:
        allow_unused: HF tensors that the engines may leave unused.

    Raises:
        WeightSyncError: lists the first few faults, each with its buffer, tensor or rank.
    """
    faults = [*_buffer_faults("engine", plan.target), *_buffer_faults("trainer", plan.source)]
    faults += [
        *_bounds_faults("engine", plan.catalog, plan.target),
        *_bounds_faults("trainer", plan.catalog, plan.source),
    ]
    _refuse(faults)  # the checks below assume consistent tables
    faults += [
        *_piece_faults(plan),
        *_sender_faults(plan),
        *_service_faults(plan),
        *_bucket_faults(plan),
        *_dtype_faults(plan),
    ]
    faults += _block_faults(plan)
    unused, partial = tensor_use(plan.catalog, plan.target)
    faults += [f"an engine uses only part of {name}" for name in partial]
    faults += [
        f"at least one engine does not use {name}; remove it from the model, or add it to "
        "allow_unused"
        for name in unused
        if name not in allow_unused
    ]
    _refuse(faults)
    padding = sum(
        int(rank.size[rank.tensor == PADDING].prod(axis=1).sum()) for rank in plan.target.classes
    )
    elements = sum(int(rank.shapes.prod(axis=1).sum()) for rank in plan.target.classes)
    return Proof(len(plan.deliveries.start), elements, padding, tuple(unused), plan.digest())


def compare_buffers(
    layout: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]], where: str
) -> None:
    """Check that an engine rank's buffers match its layout.

    Args:
        where: engine and rank, for the message.

    Raises:
        WeightSyncError: lists extra and missing buffers, and buffers with a different shape.
    """
    extra = sorted(actual.keys() - layout.keys())
    missing = sorted(layout.keys() - actual.keys())
    unlike = []
    for name in sorted(layout.keys() & actual.keys()):
        if padded(layout[name], 1) != padded(actual[name], 1):
            unlike.append((name, tuple(layout[name]), tuple(actual[name])))
    if extra or missing or unlike:
        raise WeightSyncError(
            f"{where}: the engine's buffers do not match the layout: extra {extra[:_SHOWN]}, "
            f"missing {missing[:_SHOWN]}, with a different shape {unlike[:_SHOWN]}"
        )


def tensor_use(catalog: Catalog, target: Layout) -> tuple[list[str], list[str]]:
    """Return two lists of HF tensors: those that some engine does not use, and those that some
    engine uses only partly. Scales count only for engines that load the weight in fp8.
    """
    pieces = _pieces(target)
    in_fp8 = _is_fp8(target)[_column(target, "tensor") != PADDING]
    weight_of = _scales(catalog)[1]
    kinds = set()
    for replica in np.unique(target.replica):
        kinds.add(tuple(np.unique(target.rank_class[target.replica == replica]).tolist()))
    unused: set[int] = set()
    partial: set[int] = set()
    for kind in sorted(kinds):
        mine = np.isin(pieces["class"], kind)
        tensor = pieces["tensor"][mine]
        start = pieces["start"][mine]
        size = pieces["size"][mine]
        # several ranks may use the same rectangle
        _, first = np.unique(_codes(tensor, *start.T, *size.T), return_index=True)
        tensor = tensor[first]
        start = start[first]
        size = size[first]
        taken = np.zeros(len(catalog.names), dtype=bool)
        taken[tensor] = True
        asked = (weight_of < 0) | np.isin(weight_of, pieces["tensor"][mine & in_fp8])
        unused |= set(np.flatnonzero(~taken & asked).tolist())
        for fault in cover_faults(tensor, start, size, catalog.shapes):
            here = tensor == fault.key
            if taken[fault.key] and _union(start[here], size[here]) != int(
                catalog.shapes[fault.key].prod()
            ):
                partial.add(fault.key)
    return [catalog.names[t] for t in sorted(unused)], [catalog.names[t] for t in sorted(partial)]


# ---- rectangles


@dataclass(frozen=True)
class CoverFault:
    """A coverage fault for one key.

    `kind` is `beyond` (out of bounds), `overlap` (`elements` counts pairs) or `missing` (`elements`
    counts elements).
    """

    key: int
    kind: str
    elements: int


def cover_faults(key: Array, start: Array, size: Array, bounds: Array) -> list[CoverFault]:
    """Find the keys whose rectangles do not cover `[0, bounds[key])` exactly once.

    A grid function with finite support is determined by its differences along all axes. The
    differences of a rectangle's indicator function are its corners with alternating signs.
    Therefore rectangles cover a box exactly once if and only if their signed corners sum to the
    box's signed corners.

    Args:
        key: `[N]` indices into bounds.
        start, size: `[N, D]` integers.
        bounds: `[K, D]` shape of each key.
    """
    beyond = np.unique(key[((start < 0) | (start + size > bounds[key]) | (size < 0)).any(axis=1)])
    faults = [CoverFault(int(number), "beyond", 0) for number in beyond]
    for number in _unlike_their_bounds(key, start, size, bounds, beyond).tolist():
        here = key == number
        pairs = _meeting(start[here], size[here])
        missing = int(bounds[number].prod() - size[here].prod(axis=1).sum())
        faults.append(
            CoverFault(number, "overlap", pairs)
            if pairs
            else CoverFault(number, "missing", missing)
        )
    return faults


def _unlike_their_bounds(
    key: Array, start: Array, size: Array, bounds: Array, beyond: Array
) -> Array:
    """Return the keys, except those in `beyond`, whose rectangles' signed corners differ from the
    corners of the box `[0, bounds[key])`.
    """
    keys = np.concatenate([key, np.arange(len(bounds))])
    low = np.concatenate([start, np.zeros_like(bounds)])
    high = np.concatenate([start + size, bounds])
    sign = np.where(np.arange(len(keys)) < len(key), 1, -1)
    sound = ~np.isin(keys, beyond)
    keys = keys[sound]
    low = low[sound]
    high = high[sound]
    sign = sign[sound]
    corners = list(product((0, 1), repeat=bounds.shape[1]))
    places = [np.where(np.array(corner, dtype=bool), high, low) for corner in corners]
    signs = np.concatenate([sign * (-1) ** sum(corner) for corner in corners])
    codes = _codes(np.tile(keys, len(corners)), *np.concatenate(places).T)
    order = np.argsort(codes, kind="stable")
    first = np.flatnonzero(np.diff(codes[order], prepend=-1))
    left_over = np.add.reduceat(signs[order], first) != 0 if len(first) else np.zeros(0, dtype=bool)
    return np.unique(np.tile(keys, len(corners))[order[first[left_over]]])


def _codes(*columns: Array) -> Array:
    """Encode each row of non-negative integer columns as one number. Returns `[N]`, equal only for
    equal rows."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    span = 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if span * width >= 1 << 62:
            distinct, codes = np.unique(codes, return_inverse=True)
            codes = codes.astype(np.int64)
            span = len(distinct)
        codes = codes * width + column
        span = span * width
    return codes


def _meeting(start: Array, size: Array) -> int:
    """Count the pairs of rectangles that share an element."""
    end = start + size
    pairs = 0
    for row in range(len(start) - 1):
        shared = np.minimum(end[row], end[row + 1 :]) > np.maximum(start[row], start[row + 1 :])
        pairs += int(shared.all(axis=1).sum())
    return pairs


def _union(start: Array, size: Array) -> int:
    """Count the elements in the union of the rectangles, using the grid formed by their bounds."""
    low = np.zeros_like(start)
    high = np.zeros_like(start)
    volume = np.ones((), dtype=np.int64)
    for axis, (begin, length) in enumerate(zip(start.T, size.T, strict=True)):
        cuts = np.unique([begin, begin + length])
        low[:, axis] = np.searchsorted(cuts, begin)
        high[:, axis] = np.searchsorted(cuts, begin + length)
        volume = np.multiply.outer(volume, np.diff(cuts))
    covered = np.zeros(volume.shape, dtype=bool)
    for begin, end in zip(low.tolist(), high.tolist(), strict=True):
        covered[tuple(map(slice, begin, end))] = True
    return int(volume[covered].sum())


# ---- the plan's tables


def _column(layout: Layout, name: str) -> Array:
    """Concatenate a column of `RankLayout` over all classes."""
    return np.concatenate([getattr(rank, name) for rank in layout.classes])


def _first_pieces(layout: Layout) -> Array:
    """Return the row of each class's first piece in the concatenated columns, followed by the total
    number of rows."""
    return np.cumsum([0, *(len(rank.tensor) for rank in layout.classes)])


def _is_fp8(layout: Layout) -> Array:
    """Return a mask over the pieces of all classes, including padding: True for pieces of an fp8
    buffer."""
    flags = []
    for rank in layout.classes:
        flags.append((np.array(rank.dtypes, dtype=object) == FP8)[rank.buffer])
    return np.concatenate(flags)


def _piece_of_delivery(plan: SlicePlan) -> Array:
    """Return the row of each delivery's piece in the target's concatenated columns."""
    return _first_pieces(plan.target)[plan.deliveries.receiver] + plan.deliveries.piece


def _pieces(layout: Layout) -> dict[str, Array]:
    """Concatenate the pieces of all classes, without padding. The columns are the class and the
    columns of `RankLayout`."""
    real = _column(layout, "tensor") != PADDING
    pieces = {
        "class": np.repeat(np.arange(len(layout.classes)), np.diff(_first_pieces(layout)))[real]
    }
    for name in ("tensor", "start", "size"):
        pieces[name] = _column(layout, name)[real]
    return pieces


def _scales(catalog: Catalog) -> tuple[Array, Array, Array]:
    """Return `scale_of`, `weight_of` (-1 if none) and the block size `[T, 3]` for each tensor."""
    scale_of, weight_of = np.full((2, len(catalog.names)), -1, dtype=np.int64)
    block = np.ones_like(catalog.shapes)
    for weight, scale, *sizes in catalog.scales.tolist():
        scale_of[weight] = scale
        weight_of[scale] = weight
        block[weight, 1:] = block[scale, 1:] = sizes
    return scale_of, weight_of, block


# ---- the checks


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        more = f" (and {len(faults) - _SHOWN} more)" if len(faults) > _SHOWN else ""
        raise WeightSyncError(f"could not prove the slice plan: {'; '.join(faults[:_SHOWN])}{more}")


def _buffer_faults(side: str, layout: Layout) -> Iterator[str]:
    """Yield a fault for each buffer that its pieces and declared padding do not fill exactly
    once.
    """
    first = np.cumsum([0, *(len(rank.names) for rank in layout.classes)])
    key = np.concatenate(
        [rank.buffer + offset for rank, offset in zip(layout.classes, first[:-1], strict=True)]
    )
    for fault in cover_faults(
        key, _column(layout, "local"), _column(layout, "size"), _column(layout, "shapes")
    ):
        number = int(np.searchsorted(first, fault.key, side="right")) - 1
        rank = int(np.flatnonzero(layout.rank_class == number)[0])
        name = layout.classes[number].names[fault.key - int(first[number])]
        problem = {
            "beyond": "a piece extends past its end",
            "overlap": f"{fault.elements} pairs of pieces overlap",
            "missing": f"{fault.elements} elements are not written",
        }[fault.kind]
        yield f"{side} rank {rank}, {name}: {problem}"


def _bounds_faults(side: str, catalog: Catalog, layout: Layout) -> Iterator[str]:
    pieces = _pieces(layout)
    beyond = (
        (pieces["start"] < 0)
        | (pieces["start"] + pieces["size"] > catalog.shapes[pieces["tensor"]])
        | (pieces["size"] < 1)
    )
    for row in np.flatnonzero(beyond.any(axis=1))[:_SHOWN].tolist():
        yield (
            f"{side}: a piece of {catalog.names[int(pieces['tensor'][row])]} is empty or extends "
            "beyond the tensor"
        )


def _piece_faults(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each piece that the deliveries do not fill exactly once."""
    table = plan.deliveries
    first = _first_pieces(plan.target)
    tensor = _column(plan.target, "tensor")
    piece = _piece_of_delivery(plan)
    bounds = np.where((tensor == PADDING)[:, None], 0, _column(plan.target, "size"))
    for fault in cover_faults(
        piece, table.start - _column(plan.target, "start")[piece], table.size, bounds
    ):
        number = int(np.searchsorted(first, fault.key, side="right")) - 1
        layout = plan.target.classes[number]
        name = layout.names[int(layout.buffer[fault.key - int(first[number])])]
        yield (
            f"the slices for {name} of engine class {number} do not cover its piece of "
            f"{plan.catalog.names[int(tensor[fault.key])]} exactly once: {fault.kind}"
        )


def _sender_faults(plan: SlicePlan) -> Iterator[str]:
    """Yield faults for slices outside their region or tensor, and for senders that do not hold the
    region that the plan assigns to them.
    """
    tensor = _column(plan.target, "tensor")[_piece_of_delivery(plan)]
    yield from _outside_their_regions(plan, tensor)
    yield from _not_held(plan, tensor)


def _outside_their_regions(plan: SlicePlan, tensor: Array) -> Iterator[str]:
    table = plan.deliveries
    regions = plan.regions
    offset = table.start - regions.start[table.region]
    outside = (offset < 0).any(axis=1) | (offset + table.size > regions.size[table.region]).any(
        axis=1
    )
    for row in np.flatnonzero(outside | (regions.tensor[table.region] != tensor))[:_SHOWN].tolist():
        yield (
            f"slice {row} of {plan.catalog.names[int(tensor[row])]} is not inside its source region"
        )


def _not_held(plan: SlicePlan, tensor: Array) -> Iterator[str]:
    regions = plan.regions
    sends = plan.sends
    have = _pieces(plan.source)
    asked = plan.deliveries.region[sends.delivery]
    codes = _codes(
        np.concatenate([have["class"], plan.source.rank_class[sends.source]]),
        np.concatenate([have["tensor"], regions.tensor[asked]]),
        *np.concatenate([have["start"], regions.start[asked]]).T,
        *np.concatenate([have["size"], regions.size[asked]]).T,
    )
    count = len(have["tensor"])
    for row in np.flatnonzero(~np.isin(codes[count:], codes[:count]))[:_SHOWN].tolist():
        name = plan.catalog.names[int(tensor[sends.delivery[row]])]
        yield (
            f"trainer rank {int(sends.source[row])} is assigned a slice of {name} that it does not "
            "hold"
        )


def _service_faults(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each delivery that a rank of the class receives twice or not at all."""
    sends = plan.sends
    table = plan.deliveries
    counts = np.bincount(plan.target.rank_class, minlength=len(plan.target.classes))[table.receiver]
    faults = cover_faults(
        sends.delivery, sends.first[:, None], (sends.last - sends.first)[:, None], counts[:, None]
    )
    for fault in faults:
        yield (
            f"delivery {fault.key} is not sent exactly once to each of its "
            f"{int(counts[fault.key])} engine ranks ({fault.kind})"
        )


def _bucket_faults(plan: SlicePlan) -> Iterator[str]:
    yield from _overfull(plan)
    yield from _split_over_buckets(plan)


def _overfull(plan: SlicePlan) -> Iterator[str]:
    table = plan.deliveries
    width = int(table.bucket.max(initial=0)) + 1
    filled = np.zeros(len(plan.target.classes) * width, dtype=np.int64)
    np.add.at(filled, table.receiver * width + table.bucket, table.nbytes)
    for key in np.flatnonzero(filled > plan.bucket_bytes)[:_SHOWN].tolist():
        yield (
            f"bucket {key % width} of engine class {key // width} has {int(filled[key])} bytes, "
            f"more than {plan.bucket_bytes}"
        )


def _split_over_buckets(plan: SlicePlan) -> Iterator[str]:
    table = plan.deliveries
    piece = _piece_of_delivery(plan)
    # an atom is an engine buffer, or one matrix of a stack, that is filled from several tensors
    atom = _codes(
        table.receiver,
        _column(plan.target, "buffer")[piece],
        _column(plan.target, "local")[piece, 0],
    )
    fused = _several(atom, _column(plan.target, "tensor")[piece])
    split = _several(atom, table.bucket)
    for number in np.intersect1d(fused, split)[:_SHOWN].tolist():
        row = int(np.flatnonzero(atom == number)[0])
        layout = plan.target.classes[int(table.receiver[row])]
        yield (
            f"the fused engine tensor {layout.names[int(layout.buffer[table.piece[row]])]} is "
            "split across buckets"
        )


def _several(group: Array, values: Array) -> Array:
    """Return the groups that contain more than one distinct value."""
    order = np.lexsort((values, group))
    group = group[order]
    values = values[order]
    return np.unique(group[1:][(group[1:] == group[:-1]) & (values[1:] != values[:-1])])


def _dtype_faults(plan: SlicePlan) -> Iterator[str]:
    for layout, known in ((plan.source, {*_CASTS}), (plan.target, {*_CASTS, FP8})):
        for kind in sorted({dtype for rank in layout.classes for dtype in rank.dtypes} - known):
            yield f"no conversion for dtype {kind}"
    scale_of, weight_of, _ = _scales(plan.catalog)
    for rank in plan.target.classes:
        dtype = np.array(rank.dtypes, dtype=object)[rank.buffer]
        for row in np.flatnonzero(
            (rank.tensor != PADDING) & (dtype == FP8) & (scale_of[rank.tensor] < 0)
        )[:1].tolist():
            yield (
                f"the engine's {rank.names[int(rank.buffer[row])]} is in {FP8}, but the catalog "
                "has no scales for it"
            )
        others = (rank.tensor != PADDING) & (weight_of[rank.tensor] >= 0) & (dtype != "float32")
        for row in np.flatnonzero(others)[:1].tolist():
            yield (
                f"the engine's {rank.names[int(rank.buffer[row])]} contains scales but is not in "
                "float32"
            )


def _block_faults(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each scale or fp8 weight that cannot be computed because its sender does
    not hold a whole block.
    """
    yield from _scales_without_weights(plan)
    yield from _slices_of_part_blocks(plan)


def _scales_without_weights(plan: SlicePlan) -> Iterator[str]:
    catalog = plan.catalog
    scale_of, weight_of, blocks = _scales(catalog)
    for number, rank in enumerate(plan.source.classes):
        real = rank.tensor != PADDING
        weights = np.flatnonzero(real & (scale_of[rank.tensor] >= 0))
        scales = np.flatnonzero(real & (weight_of[rank.tensor] >= 0))
        first = int(np.flatnonzero(plan.source.rank_class == number)[0])
        if len(weights) != len(scales):
            yield (
                f"trainer rank {first} has {len(weights)} pieces of weights with scales but "
                f"{len(scales)} scale pieces"
            )
            continue
        # a sender computes its k-th scale piece from its k-th weight piece
        wanted = rank.tensor[scales]
        weight = weight_of[wanted]
        block = blocks[wanted]
        start = rank.start[scales] * block
        end = np.minimum((rank.start[scales] + rank.size[scales]) * block, catalog.shapes[weight])
        unlike = (rank.tensor[weights] != weight) | (rank.start[weights] != start).any(axis=1)
        unlike |= (rank.start[weights] + rank.size[weights] != end).any(axis=1)
        for row in np.flatnonzero(unlike)[:_SHOWN].tolist():
            yield (
                f"trainer rank {first} does not hold the weights for its part of "
                f"{catalog.names[int(wanted[row])]}"
            )


def _slices_of_part_blocks(plan: SlicePlan) -> Iterator[str]:
    table = plan.deliveries
    regions = plan.regions
    rows = np.flatnonzero(_is_fp8(plan.target)[_piece_of_delivery(plan)])
    region = table.region[rows]
    tensor = regions.tensor[region]
    block = _scales(plan.catalog)[2][tensor]
    start = table.start[rows]
    end = start + table.size[rows]
    # whole blocks from the first to the last that the slice touches; the tensor's last blocks may
    # be smaller
    low = start - start % block
    high = np.minimum(end + -end % block, plan.catalog.shapes[tensor])
    held = regions.start[region]
    outside = (low < held) | (high > held + regions.size[region])
    for row in np.flatnonzero(outside.any(axis=1))[:_SHOWN].tolist():
        yield (
            f"slice {int(rows[row])} of {plan.catalog.names[int(tensor[row])]} needs fp8 blocks "
            "that extend beyond the region it is computed from"
        )
