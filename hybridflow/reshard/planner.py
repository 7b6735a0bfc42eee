"""Builds slice plans: intersects both layouts, fills buckets and assigns senders.

The planner is vectorised and has no side effects. Planning for a model with 10^12 parameters takes
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models.fp8 import FP8
from hybridflow.reshard import regions as boxes
from hybridflow.reshard.balance import assign_sources
from hybridflow.reshard.fp8_blocks import SCALE_DTYPE, Quantised, with_scales
from hybridflow.reshard.layout import PADDING, Catalog, Layout
from hybridflow.reshard.regions import group_rows
from hybridflow.reshard.slices import (
    Deliveries,
    Regions,
    SlicePlan,
    buffer_item_bytes,
    piece_columns,
)

Array = np.ndarray
Table = dict[str, Array]

# Dtypes between which a sender can cast while packing. Block-wise fp8 also requires scales in the
# catalog.
CASTS = ("float32", "bfloat16", "float16")


def make_plan(catalog: Catalog, source: Layout, target: Layout, staging_bytes: int) -> SlicePlan:
    """Plan the transfer of all tensors in the target's pieces.

    Args:
        catalog: includes the scales of tensors that an engine loads in block-wise fp8. The source
            layout may omit them.
        staging_bytes: memory for messages in flight per rank, sender or receiver. It must fit two
            buckets.

    Raises:
        WeightSyncError: the source lacks a tensor that the target needs, a dtype pair has no
            conversion, a trainer rank's piece cuts through an fp8 block, or a fused tensor does not
            fit in a bucket.
    """
    conversions = _conversions(catalog, source, target)
    source = with_scales(source, catalog)
    have = piece_columns(source)
    need = piece_columns(target)
    regions, of_piece = _regions(have)
    deliveries = _intersect(catalog, regions, need)
    item_bytes = buffer_item_bytes(target, need)
    deliveries["item"] = item_bytes[deliveries["need"]]
    bucket_bytes = staging_bytes // 2
    chopped = _chop(catalog, deliveries, need, bucket_bytes)
    rows = _fill_buckets(_order(chopped, need), need, target, bucket_bytes)
    table = _table(rows, need)
    first = regions["first"]
    offsets, classes = _holders(have, of_piece)
    holders = Regions(
        have["tensor"][first], have["start"][first], have["size"][first], offsets, classes
    )
    sends = assign_sources(table, holders, source, target.ranks_per_class())
    phases = _phases(table, target)
    return SlicePlan(
        catalog, source, target, holders, table, sends, phases, bucket_bytes, conversions
    )


def _pick(table: Table, rows: Array) -> Table:
    """Return the given rows of all columns."""
    return {name: values[rows] for name, values in table.items()}


def _regions(have: Table) -> tuple[Table, Array]:
    """Return the distinct source rectangles, split into disjoint parts where they overlap."""
    rectangles = np.column_stack([have["tensor"], have["start"], have["size"]])
    first, group = group_rows(rectangles)
    distinct = _pick(have, first)
    tensor = distinct["tensor"]
    owner, start, size = boxes.make_disjoint(tensor, distinct["start"], distinct["size"])
    parts = {
        "first": first,
        "part": owner,
        "tensor": tensor[owner],
        "start": start,
        "size": size,
    }
    return parts, group


def _holders(have: Table, group: Array) -> tuple[Array, Array]:
    pairs, _ = group_rows(np.column_stack([group, have["class"]]))
    counts = np.bincount(group[pairs])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return offsets, have["class"][pairs]


def _intersect(catalog: Catalog, regions: Table, need: Table) -> Table:
    i, j = boxes.pairs_of_equal_key(need["tensor"], regions["tensor"])
    start, size = boxes.intersect(
        need["start"][i], need["size"][i], regions["start"][j], regions["size"][j]
    )
    pairs = {"need": i, "region": regions["part"][j], "start": start, "size": size}
    meets = np.flatnonzero((size > 0).all(axis=1))
    rows = _pick(pairs, meets)
    found = np.zeros(len(need["tensor"]), dtype=np.int64)
    np.add.at(found, rows["need"], boxes.volumes(rows["size"]))
    is_short = found != boxes.volumes(need["size"])
    if is_short.any():
        tensors = np.unique(need["tensor"][is_short])
        names = sorted(catalog.names[tensor] for tensor in tensors)
        shown = ", ".join(names[:4])
        raise WeightSyncError(
            f"no trainer rank holds all of {shown} ({len(names)} tensors); check that no pipeline "
            "stage is missing"
        )
    return rows


def _atoms(need: Table) -> tuple[Array, Array]:
    """Return the index of each target piece's atom, and a flag per atom: True if it is
    filled from several tensors.

    An atom is an engine buffer, or one matrix of a stacked buffer.
    """
    matrix = need["local"][:, 0]
    _, atom = group_rows(np.column_stack([need["class"], need["buffer"], matrix]))
    pairs, _ = group_rows(np.column_stack([atom, need["tensor"]]))
    tensors = np.bincount(atom[pairs])
    return atom, tensors > 1


def _chop(catalog: Catalog, rows: Table, need: Table, bucket_bytes: int) -> Table:
    """Cut slices larger than a bucket along their first axis that is longer than one.

    fp8 slices are cut at block boundaries if a whole block fits in a bucket, so that a sender
    computes each scale once.
    """
    atom, fused = _atoms(need)
    piece = rows["need"]
    nbytes = boxes.volumes(rows["size"]) * rows["item"]
    is_large = (nbytes > bucket_bytes) & ~fused[atom[piece]]
    large = np.flatnonzero(is_large)
    axis = np.argmax(rows["size"] > 1, axis=1)
    length = rows["size"][np.arange(len(axis)), axis]
    row_bytes = nbytes // length
    step = length.copy()
    step[large] = bucket_bytes // row_bytes[large]
    if (step < 1).any():
        most = int(row_bytes[step < 1].max())
        raise WeightSyncError(
            f"a tensor row of {most} bytes does not fit in a bucket of {bucket_bytes} bytes; set "
            f"the staging bytes to at least {2 * most}"
        )
    table = Quantised.of(catalog)
    tensor = need["tensor"][piece[large]]
    has_scales = table.scale_of[tensor] >= 0
    block = np.where(has_scales, table.block[tensor, axis[large]], 1)
    whole_blocks = step[large] // block * block
    step[large] = np.where(whole_blocks > 0, whole_blocks, step[large])
    counts = np.ones_like(length)
    counts[large] = -(-length[large] // step[large])
    pick = np.repeat(np.arange(len(counts)), counts)
    chopped = _pick(rows, pick)
    part = (np.arange(len(pick)), axis[pick])
    step = step[pick]
    offset = boxes.ranges(counts) * step
    chopped["start"][part] += offset
    chopped["size"][part] = np.minimum(step, length[pick] - offset)
    return chopped


def _order(rows: Table, need: Table) -> Table:
    """Sort by class, then in checkpoint order. The slices of an atom stay adjacent."""
    atom, fused = _atoms(need)
    lead = np.full(len(fused), np.iinfo(np.int64).max)
    np.minimum.at(lead, atom, need["tensor"])
    piece = rows["need"]
    mine = atom[piece]
    tensor = need["tensor"][piece]
    # slices of a single-tensor atom are separate units
    position = np.where(fused[mine], lead[mine], tensor)
    starts = rows["start"].T[::-1]
    # np.lexsort sorts by its last key first
    order = np.lexsort((*starts, tensor, mine, position, need["class"][piece]))
    ordered = _pick(rows, order)
    mine = mine[order]
    joined = np.zeros(len(mine), dtype=bool)
    joined[1:] = mine[1:] == mine[:-1]
    joined &= fused[mine]
    ordered["unit"] = np.cumsum(~joined) - 1
    return ordered


def _fill_buckets(rows: Table, need: Table, target: Layout, bucket_bytes: int) -> Table:
    """Fill each class's buckets with consecutive units, packing as many units into each bucket as
    fit.
    """
    nbytes = boxes.volumes(rows["size"]) * rows["item"]
    first = np.flatnonzero(np.diff(rows["unit"], prepend=-1))
    units = np.add.reduceat(nbytes, first) if len(first) else nbytes
    piece = rows["need"][first]
    most = int(units.max(initial=0))
    if most > bucket_bytes:
        worst = piece[units.argmax()]
        layout = target.classes[need["class"][worst]]
        name = layout.names[need["buffer"][worst]]
        raise WeightSyncError(
            f"the fused engine tensor {name} ({most} bytes) cannot be split and does not fit in a "
            f"bucket of {bucket_bytes} bytes; set the staging bytes to at least {2 * most}"
        )
    numbers = []
    current = 0
    filled = 0
    owner = -1
    receivers = need["class"][piece].tolist()
    for size, number in zip(units.tolist(), receivers, strict=True):
        if number != owner:
            owner = number
            current = 0
            filled = 0
        elif filled + size > bucket_bytes:
            current = current + 1
            filled = 0
        filled += size
        numbers.append(current)
    buckets = np.array(numbers, dtype=np.int64)
    rows["bucket"] = buckets[rows["unit"]]
    rows["nbytes"] = nbytes
    return rows


def _table(rows: Table, need: Table) -> Deliveries:
    keys = np.column_stack([rows["region"], rows["start"], rows["size"], rows["item"]])
    _, slice_id = group_rows(keys)
    piece = rows["need"]
    return Deliveries(
        receiver=need["class"][piece],
        piece=need["row"][piece],
        region=rows["region"],
        start=rows["start"],
        size=rows["size"],
        nbytes=rows["nbytes"],
        bucket=rows["bucket"],
        slice_id=slice_id,
    )


def _phases(table: Deliveries, target: Layout) -> Array:
    """Choose each engine rank's first bucket, such that first buckets are spread evenly over all
    buckets. If all ranks started with layer 0, they would queue at the first pipeline stage.
    """
    last = np.zeros(len(target.classes), dtype=np.int64)
    np.maximum.at(last, table.receiver, table.bucket)
    member = np.zeros(target.num_ranks, dtype=np.int64)
    for replica in np.unique(target.replica):
        mine = np.flatnonzero(target.replica == replica)
        member[mine] = np.arange(len(mine))
    # Multiples of two irrational numbers modulo one: neighbours are far apart and any prefix is
    # spread evenly.
    multiples = target.replica * 0.6180339887498949 + member * 0.4142135623730951
    place, _ = np.modf(multiples)
    buckets = last[target.rank_class] + 1
    return np.floor(place * buckets).astype(np.int64)


def _conversions(catalog: Catalog, source: Layout, target: Layout) -> tuple[tuple[str, str], ...]:
    """Return the (trainer dtype, engine dtype) pairs that differ. The sender casts while
    packing."""
    have = source.dtypes()
    need = target.dtypes()
    bad = sorted((have - {*CASTS}) | (need - {*CASTS, FP8}))
    if bad:
        supported = ", ".join(CASTS)
        raise WeightSyncError(
            f"no conversion between {', '.join(bad)} and the other side's dtypes; supported: "
            f"casts among {supported} and from these to block-wise {FP8}"
        )
    problem = next(_fp8_faults(catalog, target), None)
    if problem is not None:
        raise WeightSyncError(
            f"{problem}; add the scales of the model's quantization_config to the catalog, or "
            "serve in bfloat16"
        )
    pairs = product(sorted(have), sorted(need))
    return tuple((a, b) for a, b in pairs if a != b)


def _fp8_faults(catalog: Catalog, target: Layout) -> Iterator[str]:
    """Yield fp8 engine buffers whose tensor has no scales, and engine scale buffers that are not
    float32."""
    table = Quantised.of(catalog)
    without_scales = table.scale_of < 0
    are_scales = table.weight_of >= 0
    rules = (
        (without_scales, CASTS, f"is in {FP8}, but the catalog has no scales for it"),
        (are_scales, (SCALE_DTYPE,), f"contains scales but is not in {SCALE_DTYPE}"),
    )
    for rank in target.classes:
        real = rank.tensor != PADDING
        for tensors, wanted, problem in rules:
            allowed = np.array([dtype in wanted for dtype in rank.dtypes], dtype=bool)
            wrong = real & tensors[rank.tensor] & ~allowed[rank.buffer]
            for row in np.flatnonzero(wrong)[:1]:
                buffer = rank.names[rank.buffer[row]]
                tensor = catalog.names[rank.tensor[row]]
                yield f"the engine's {buffer} {problem} ({tensor})"
