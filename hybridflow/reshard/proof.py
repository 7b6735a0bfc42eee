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
from hybridflow.reshard.layout import PADDING, Catalog, Layout, RankLayout, padded
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
    sides = (("engine", plan.target), ("trainer", plan.source))
    faults: list[str] = []
    for side, layout in sides:
        faults += _buffer_faults(side, layout)
    for side, layout in sides:
        faults += _bounds_faults(side, plan.catalog, layout)
    _refuse(faults)  # the checks below assume consistent tables
    for check in (
        _piece_faults,
        _outside_their_regions,
        _not_held,
        _service_faults,
        _overfull,
        _split_over_buckets,
        _dtype_faults,
        _scales_without_weights,
        _slices_of_part_blocks,
    ):
        faults += check(plan)
    unused, partial = tensor_use(plan.catalog, plan.target)
    faults += [f"an engine uses only part of {name}" for name in partial]
    for name in unused:
        if name not in allow_unused:
            faults.append(
                f"at least one engine does not use {name}; remove it from the model, or add it to "
                "allow_unused"
            )
    _refuse(faults)
    padding = 0
    elements = 0
    for rank in plan.target.classes:
        padding += _elements(rank.size[rank.tensor == PADDING])
        elements += _elements(rank.shapes)
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
        planned = tuple(layout[name])
        found = tuple(actual[name])
        if padded(planned, 1) != padded(found, 1):
            unlike.append((name, planned, found))
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
    _, weight_of, _ = _scales(catalog)
    kinds = set()
    for replica in np.unique(target.replica):
        classes = np.unique(target.rank_class[target.replica == replica])
        kinds.add(tuple(classes.tolist()))
    unused: set[int] = set()
    partial: set[int] = set()
    for kind in sorted(kinds):
        mine = np.isin(pieces["class"], kind)
        tensor = pieces["tensor"][mine]
        start = pieces["start"][mine]
        size = pieces["size"][mine]
        # several ranks may use the same rectangle
        codes = _codes(tensor, *start.T, *size.T)
        _, first = np.unique(codes, return_index=True)
        tensor = tensor[first]
        start = start[first]
        size = size[first]
        taken = np.zeros(len(catalog.names), dtype=bool)
        taken[tensor] = True
        fp8_weights = pieces["tensor"][mine & in_fp8]
        needed = (weight_of < 0) | np.isin(weight_of, fp8_weights)
        unused.update(np.flatnonzero(~taken & needed).tolist())
        for fault in cover_faults(tensor, start, size, catalog.shapes):
            if not taken[fault.key]:
                continue
            here = tensor == fault.key
            used = _union(start[here], size[here])
            if used != int(catalog.shapes[fault.key].prod()):
                partial.add(fault.key)
    return _names(catalog, unused), _names(catalog, partial)


def _names(catalog: Catalog, tensors: Collection[int]) -> list[str]:
    """Return the names of tensors, in the catalog's order."""
    return [catalog.names[tensor] for tensor in sorted(tensors)]


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
    outside = (start < 0) | (start + size > bounds[key]) | (size < 0)
    beyond = np.unique(key[outside.any(axis=1)])
    faults = [CoverFault(int(number), "beyond", 0) for number in beyond]
    for number in _unlike_their_bounds(key, start, size, bounds, beyond).tolist():
        here = key == number
        pairs = _meeting(start[here], size[here])
        if pairs:
            faults.append(CoverFault(number, "overlap", pairs))
        else:
            missing = int(bounds[number].prod()) - _elements(size[here])
            faults.append(CoverFault(number, "missing", missing))
    return faults


def _elements(size: Array) -> int:
    """Return the number of elements of rectangles `[N, D]` in all."""
    return int(size.prod(axis=1).sum())


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
    if not len(keys):
        return keys
    places = []
    signs = []
    for corner in product((0, 1), repeat=bounds.shape[1]):
        places.append(np.where(corner, high, low))
        signs.append(sign * (-1) ** sum(corner))
    corner_keys = np.tile(keys, len(places))
    codes = _codes(corner_keys, *np.concatenate(places).T)
    order = np.argsort(codes, kind="stable")
    first = np.flatnonzero(np.diff(codes[order], prepend=-1))
    left_over = np.add.reduceat(np.concatenate(signs)[order], first)
    unlike = order[first[left_over != 0]]
    return np.unique(corner_keys[unlike])


def _codes(*columns: Array) -> Array:
    """Encode each row of non-negative integer columns as one number. Returns `[N]`, equal only for
    equal rows."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    span = 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if span * width >= 1 << 62:
            distinct, numbers = np.unique(codes, return_inverse=True)
            codes = numbers.astype(np.int64)
            span = len(distinct)
        codes = codes * width + column
        span *= width
    return codes


def _meeting(start: Array, size: Array) -> int:
    """Count the pairs of rectangles that share an element."""
    end = start + size
    pairs = 0
    for row in range(len(start) - 1):
        low = np.maximum(start[row], start[row + 1 :])
        high = np.minimum(end[row], end[row + 1 :])
        shares = (high > low).all(axis=1)
        pairs += int(shares.sum())
    return pairs


def _union(start: Array, size: Array) -> int:
    """Count the elements in the union of the rectangles, using the grid formed by their bounds."""
    low = np.zeros_like(start)
    high = np.zeros_like(start)
    volume = np.ones((), dtype=np.int64)
    for axis, (begin, length) in enumerate(zip(start.T, size.T, strict=True)):
        end = begin + length
        cuts = np.unique([begin, end])
        low[:, axis] = np.searchsorted(cuts, begin)
        high[:, axis] = np.searchsorted(cuts, end)
        volume = np.multiply.outer(volume, np.diff(cuts))
    covered = np.zeros(volume.shape, dtype=bool)
    for begin, end in zip(low.tolist(), high.tolist(), strict=True):
        covered[tuple(map(slice, begin, end))] = True
    return int(volume[covered].sum())


# ---- the plan's tables


def _column(layout: Layout, name: str) -> Array:
    """Concatenate a column of `RankLayout` over all classes."""
    return np.concatenate([getattr(rank, name) for rank in layout.classes])


def _first_rows(layout: Layout, name: str) -> Array:
    """Return each class's first row in the concatenated column, followed by the total number of
    rows."""
    counts = [len(getattr(rank, name)) for rank in layout.classes]
    return np.cumsum([0, *counts])


def _first_rank(layout: Layout, number: int) -> int:
    """Return the first rank of a class."""
    return int(np.flatnonzero(layout.rank_class == number)[0])


def _place(first: Array, row: int) -> tuple[int, int]:
    """Return the class that a row of a concatenated column belongs to, and the row's index within
    the class. `first` has each class's first row."""
    number = int(np.searchsorted(first, row, side="right")) - 1
    return number, row - int(first[number])


def _is_fp8(layout: Layout) -> Array:
    """Return a mask over the pieces of all classes, including padding: True for pieces of an fp8
    buffer."""
    return np.concatenate([_dtypes(rank) == FP8 for rank in layout.classes])


def _dtypes(rank: RankLayout) -> Array:
    """Return the dtype of each piece's buffer."""
    return np.array(rank.dtypes, dtype=object)[rank.buffer]


def _piece_of_delivery(plan: SlicePlan) -> Array:
    """Return the row of each delivery's piece in the target's concatenated columns."""
    first = _first_rows(plan.target, "tensor")
    return first[plan.deliveries.receiver] + plan.deliveries.piece


def _tensor_of_delivery(plan: SlicePlan) -> Array:
    """Return the index of each delivery's HF tensor in the catalog."""
    return _column(plan.target, "tensor")[_piece_of_delivery(plan)]


def _pieces(layout: Layout) -> dict[str, Array]:
    """Concatenate the pieces of all classes, without padding. The columns are the class and the
    columns of `RankLayout`."""
    real = _column(layout, "tensor") != PADDING
    counts = np.diff(_first_rows(layout, "tensor"))
    classes = np.repeat(np.arange(len(counts)), counts)
    pieces = {"class": classes[real]}
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
        shown = "; ".join(faults[:_SHOWN])
        hidden = len(faults) - _SHOWN
        more = f" (and {hidden} more)" if hidden > 0 else ""
        raise WeightSyncError(f"could not prove the slice plan: {shown}{more}")


def _rows(wrong: Array) -> list[int]:
    """Return the first few rows whose flag is set, at most as many as a message lists."""
    return list(np.flatnonzero(wrong)[:_SHOWN].tolist())


def _buffer_faults(side: str, layout: Layout) -> Iterator[str]:
    """Yield a fault for each buffer that its pieces and declared padding do not fill exactly
    once.
    """
    first = _first_rows(layout, "names")
    buffers = []
    for rank, offset in zip(layout.classes, first[:-1], strict=True):
        buffers.append(rank.buffer + offset)
    key = np.concatenate(buffers)
    start = _column(layout, "local")
    size = _column(layout, "size")
    for fault in cover_faults(key, start, size, _column(layout, "shapes")):
        number, buffer = _place(first, fault.key)
        name = layout.classes[number].names[buffer]
        problem = {
            "beyond": "a piece extends past its end",
            "overlap": f"{fault.elements} pairs of pieces overlap",
            "missing": f"{fault.elements} elements are not written",
        }[fault.kind]
        yield f"{side} rank {_first_rank(layout, number)}, {name}: {problem}"


def _bounds_faults(side: str, catalog: Catalog, layout: Layout) -> Iterator[str]:
    pieces = _pieces(layout)
    tensor = pieces["tensor"]
    start = pieces["start"]
    size = pieces["size"]
    beyond = (start < 0) | (start + size > catalog.shapes[tensor]) | (size < 1)
    for row in _rows(beyond.any(axis=1)):
        name = catalog.names[tensor[row]]
        yield f"{side}: a piece of {name} is empty or extends beyond the tensor"


def _piece_faults(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each piece that the deliveries do not fill exactly once."""
    table = plan.deliveries
    first = _first_rows(plan.target, "tensor")
    tensor = _column(plan.target, "tensor")
    piece = _piece_of_delivery(plan)
    start = table.start - _column(plan.target, "start")[piece]
    is_padding = tensor == PADDING
    bounds = np.where(is_padding[:, None], 0, _column(plan.target, "size"))
    for fault in cover_faults(piece, start, table.size, bounds):
        number, row = _place(first, fault.key)
        layout = plan.target.classes[number]
        name = layout.names[layout.buffer[row]]
        yield (
            f"the slices for {name} of engine class {number} do not cover its piece of "
            f"{plan.catalog.names[tensor[fault.key]]} exactly once: {fault.kind}"
        )


def _outside_their_regions(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each slice outside its region or tensor."""
    table = plan.deliveries
    regions = plan.regions
    tensor = _tensor_of_delivery(plan)
    region = table.region
    offset = table.start - regions.start[region]
    beyond = (offset < 0) | (offset + table.size > regions.size[region])
    is_other = regions.tensor[region] != tensor
    for row in _rows(beyond.any(axis=1) | is_other):
        name = plan.catalog.names[tensor[row]]
        yield f"slice {row} of {name} is not inside its source region"


def _not_held(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each sender that does not hold the region that the plan assigns to it."""
    regions = plan.regions
    sends = plan.sends
    tensor = _tensor_of_delivery(plan)
    have = _pieces(plan.source)
    asked = plan.deliveries.region[sends.delivery]
    codes = _codes(
        np.concatenate([have["class"], plan.source.rank_class[sends.source]]),
        np.concatenate([have["tensor"], regions.tensor[asked]]),
        *np.concatenate([have["start"], regions.start[asked]]).T,
        *np.concatenate([have["size"], regions.size[asked]]).T,
    )
    held, wanted = np.split(codes, [len(have["tensor"])])
    for row in _rows(~np.isin(wanted, held)):
        name = plan.catalog.names[tensor[sends.delivery[row]]]
        yield (
            f"trainer rank {sends.source[row]} is assigned a slice of {name} that it does not hold"
        )


def _service_faults(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each delivery that a rank of the class receives twice or not at all."""
    sends = plan.sends
    table = plan.deliveries
    counts = plan.target.ranks_per_class()[table.receiver]
    first = sends.first[:, None]
    served = sends.last[:, None] - first
    for fault in cover_faults(sends.delivery, first, served, counts[:, None]):
        yield (
            f"delivery {fault.key} is not sent exactly once to each of its {counts[fault.key]} "
            f"engine ranks ({fault.kind})"
        )


def _overfull(plan: SlicePlan) -> Iterator[str]:
    table = plan.deliveries
    width = int(table.bucket.max(initial=0)) + 1
    bucket = table.receiver * width + table.bucket
    filled = np.zeros(len(plan.target.classes) * width, dtype=np.int64)
    np.add.at(filled, bucket, table.nbytes)
    for key in _rows(filled > plan.bucket_bytes):
        number, index = divmod(key, width)
        yield (
            f"bucket {index} of engine class {number} has {filled[key]} bytes, more than "
            f"{plan.bucket_bytes}"
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
    fused = _several(atom, _tensor_of_delivery(plan))
    split = _several(atom, table.bucket)
    for number in np.intersect1d(fused, split)[:_SHOWN]:
        row = np.flatnonzero(atom == number)[0]
        layout = plan.target.classes[table.receiver[row]]
        name = layout.names[layout.buffer[table.piece[row]]]
        yield f"the fused engine tensor {name} is split across buckets"


def _several(group: Array, values: Array) -> Array:
    """Return the groups that contain more than one distinct value."""
    order = np.lexsort((values, group))
    group = group[order]
    values = values[order]
    same_group = group[1:] == group[:-1]
    other_value = values[1:] != values[:-1]
    return np.unique(group[1:][same_group & other_value])


def _dtype_faults(plan: SlicePlan) -> Iterator[str]:
    casts = {*_CASTS}
    for unknown in (plan.source.dtypes() - casts, plan.target.dtypes() - casts - {FP8}):
        for kind in sorted(unknown):
            yield f"no conversion for dtype {kind}"
    scale_of, weight_of, _ = _scales(plan.catalog)
    for rank in plan.target.classes:
        real = rank.tensor != PADDING
        dtype = _dtypes(rank)
        without_scales = real & (dtype == FP8) & (scale_of[rank.tensor] < 0)
        for row in _rows(without_scales)[:1]:
            name = rank.names[rank.buffer[row]]
            yield f"the engine's {name} is in {FP8}, but the catalog has no scales for it"
        others = real & (weight_of[rank.tensor] >= 0) & (dtype != "float32")
        for row in _rows(others)[:1]:
            name = rank.names[rank.buffer[row]]
            yield f"the engine's {name} contains scales but is not in float32"


def _scales_without_weights(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each scale that cannot be computed because its sender does not hold the
    whole blocks of weights."""
    catalog = plan.catalog
    scale_of, weight_of, blocks = _scales(catalog)
    for number, rank in enumerate(plan.source.classes):
        real = rank.tensor != PADDING
        weights = np.flatnonzero(real & (scale_of[rank.tensor] >= 0))
        scales = np.flatnonzero(real & (weight_of[rank.tensor] >= 0))
        first = _first_rank(plan.source, number)
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
        end = (rank.start[scales] + rank.size[scales]) * block
        end = np.minimum(end, catalog.shapes[weight])
        held_start = rank.start[weights]
        held_end = held_start + rank.size[weights]
        unlike = ((held_start != start) | (held_end != end)).any(axis=1)
        for row in _rows(unlike | (rank.tensor[weights] != weight)):
            name = catalog.names[wanted[row]]
            yield f"trainer rank {first} does not hold the weights for its part of {name}"


def _slices_of_part_blocks(plan: SlicePlan) -> Iterator[str]:
    """Yield a fault for each fp8 slice that cannot be computed because its sender does not hold a
    whole block."""
    table = plan.deliveries
    regions = plan.regions
    is_fp8 = _is_fp8(plan.target)[_piece_of_delivery(plan)]
    rows = np.flatnonzero(is_fp8)
    region = table.region[rows]
    tensor = regions.tensor[region]
    _, _, blocks = _scales(plan.catalog)
    block = blocks[tensor]
    start = table.start[rows]
    end = start + table.size[rows]
    # whole blocks from the first to the last that the slice touches; the tensor's last blocks may
    # be smaller
    low = start - start % block
    high = np.minimum(end + -end % block, plan.catalog.shapes[tensor])
    held = regions.start[region]
    outside = (low < held) | (high > held + regions.size[region])
    for row in _rows(outside.any(axis=1)):
        name = plan.catalog.names[tensor[row]]
        yield (
            f"slice {rows[row]} of {name} needs fp8 blocks that extend beyond the region it is "
            "computed from"
        )
