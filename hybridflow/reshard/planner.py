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
    deliveries["item"] = buffer_item_bytes(target, need)[deliveries["need"]]
    bucket_bytes = staging_bytes // 2
    rows = _fill_buckets(
        _order(_chop(catalog, deliveries, need, bucket_bytes), need), need, target, bucket_bytes
    )
    table = _table(rows, need)
    tensor, start, size = (have[name][regions["first"]] for name in ("tensor", "start", "size"))
    holders = Regions(tensor, start, size, *_holders(have, of_piece))
    counts = np.bincount(target.rank_class, minlength=len(target.classes))
    sends = assign_sources(table, holders, source, counts)
    return SlicePlan(
        catalog,
        source,
        target,
        holders,
        table,
        sends,
        _phases(table, target),
        bucket_bytes,
        conversions,
    )


def _regions(have: Table) -> tuple[Table, Array]:
    """Return the distinct source rectangles, split into disjoint parts where they overlap."""
    first, group = group_rows(np.column_stack([have["tensor"], have["start"], have["size"]]))
    owner, start, size = boxes.make_disjoint(
        have["tensor"][first], have["start"][first], have["size"][first]
    )
    parts = {
        "first": first,
        "part": owner,
        "tensor": have["tensor"][first][owner],
        "start": start,
        "size": size,
    }
    return parts, group


def _holders(have: Table, group: Array) -> tuple[Array, Array]:
    pairs, _ = group_rows(np.column_stack([group, have["class"]]))
    counts = np.bincount(group[pairs], minlength=int(group.max()) + 1 if len(group) else 0)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), have["class"][pairs]


def _intersect(catalog: Catalog, regions: Table, need: Table) -> Table:
    i, j = boxes.pairs_of_equal_key(need["tensor"], regions["tensor"])
    start, size = boxes.intersect(
        need["start"][i], need["size"][i], regions["start"][j], regions["size"][j]
    )
    meets = (size > 0).all(axis=1)
    i = i[meets]
    j = j[meets]
    start = start[meets]
    size = size[meets]
    found = np.zeros(len(need["tensor"]), dtype=np.int64)
    np.add.at(found, i, boxes.volumes(size))
    short = np.flatnonzero(found != boxes.volumes(need["size"]))
    if len(short):
        names = sorted({catalog.names[t] for t in need["tensor"][short].tolist()})
        raise WeightSyncError(
            f"no trainer rank holds all of {', '.join(names[:4])} ({len(names)} tensors); check "
            "that no pipeline stage is missing"
        )
    return {"need": i, "region": regions["part"][j], "start": start, "size": size}


def _atoms(need: Table) -> tuple[Array, Array]:
    """Return the index of each target piece's atom, and a flag per atom: True if it is
    filled from several tensors.

    An atom is an engine buffer, or one matrix of a stacked buffer.
    """
    _, atom = group_rows(np.column_stack([need["class"], need["buffer"], need["local"][:, 0]]))
    pairs, _ = group_rows(np.column_stack([atom, need["tensor"]]))
    return atom, np.bincount(atom[pairs]) > 1


def _chop(catalog: Catalog, rows: Table, need: Table, bucket_bytes: int) -> Table:
    """Cut slices larger than a bucket along their first axis that is longer than one.

    fp8 slices are cut at block boundaries if a whole block fits in a bucket, so that a sender
    computes each scale once.
    """
    atom, fused = _atoms(need)
    nbytes = boxes.volumes(rows["size"]) * rows["item"]
    large = np.flatnonzero((nbytes > bucket_bytes) & ~fused[atom[rows["need"]]])
    counts = np.ones(len(nbytes), dtype=np.int64)
    axis = np.argmax(rows["size"] > 1, axis=1)
    length = rows["size"][np.arange(len(axis)), axis]
    step = length.copy()
    step[large] = bucket_bytes // (nbytes[large] // length[large])
    if (step < 1).any():
        most = int((nbytes // length)[step < 1].max())
        raise WeightSyncError(
            f"a tensor row of {most} bytes does not fit in a bucket of {bucket_bytes} bytes; set "
            f"the staging bytes to at least {2 * most}"
        )
    table = Quantised.of(catalog)
    tensor = need["tensor"][rows["need"][large]]
    block = np.where(table.scale_of[tensor] >= 0, table.block[tensor, axis[large]], 1)
    step[large] = np.where(step[large] >= block, step[large] // block * block, step[large])
    counts[large] = -(-length[large] // step[large])
    pick = np.repeat(np.arange(len(counts)), counts)
    block = boxes.ranges(counts)
    chopped = {name: values[pick] for name, values in rows.items()}
    along = axis[pick]
    index = np.arange(len(pick))
    chopped["start"][index, along] += block * step[pick]
    chopped["size"][index, along] = np.minimum(step[pick], length[pick] - block * step[pick])
    return chopped


def _order(rows: Table, need: Table) -> Table:
    """Sort by class, then in checkpoint order. The slices of an atom stay adjacent."""
    atom, fused = _atoms(need)
    lead = np.full(len(fused), np.iinfo(np.int64).max)
    np.minimum.at(lead, atom, need["tensor"])
    mine = atom[rows["need"]]
    tensor = need["tensor"][rows["need"]]
    # slices of a single-tensor atom are separate units
    position = np.where(fused[mine], lead[mine], tensor)
    # np.lexsort sorts by its last key first
    order = np.lexsort(
        (*rows["start"].T[::-1], tensor, mine, position, need["class"][rows["need"]])
    )
    ordered = {name: values[order] for name, values in rows.items()}
    mine = mine[order]
    joined = np.zeros(len(mine), dtype=bool)
    joined[1:] = (mine[1:] == mine[:-1]) & fused[mine[1:]]
    ordered["unit"] = np.cumsum(~joined) - 1
    return ordered


def _fill_buckets(rows: Table, need: Table, target: Layout, bucket_bytes: int) -> Table:
    """Fill each class's buckets with consecutive units, packing as many units into each bucket as
    fit.
    """
    nbytes = boxes.volumes(rows["size"]) * rows["item"]
    first = np.flatnonzero(np.diff(rows["unit"], prepend=-1))
    units = np.add.reduceat(nbytes, first) if len(first) else np.empty(0, dtype=np.int64)
    if len(units) and units.max() > bucket_bytes:
        worst = int(rows["need"][first[int(units.argmax())]])
        layout = target.classes[int(need["class"][worst])]
        name = layout.names[int(need["buffer"][worst])]
        most = int(units.max())
        raise WeightSyncError(
            f"the fused engine tensor {name} ({most} bytes) cannot be split and does not fit in a "
            f"bucket of {bucket_bytes} bytes; set the staging bytes to at least {2 * most}"
        )
    numbers = []
    current = 0
    filled = 0
    owner = -1
    for size, number in zip(
        units.tolist(), need["class"][rows["need"][first]].tolist(), strict=True
    ):
        if number != owner:
            owner = number
            current = 0
            filled = 0
        elif filled + size > bucket_bytes:
            current = current + 1
            filled = 0
        filled += size
        numbers.append(current)
    rows["bucket"] = (
        np.array(numbers, dtype=np.int64)[rows["unit"]] if numbers else np.empty(0, dtype=np.int64)
    )
    rows["nbytes"] = nbytes
    return rows


def _table(rows: Table, need: Table) -> Deliveries:
    keys = np.column_stack([rows["region"], rows["start"], rows["size"], rows["item"]])
    _, slice_id = group_rows(keys)
    receiver = need["class"][rows["need"]]
    piece = need["row"][rows["need"]]
    return Deliveries(
        receiver,
        piece,
        rows["region"],
        rows["start"],
        rows["size"],
        rows["nbytes"],
        rows["bucket"],
        slice_id,
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
    place = np.modf(target.replica * 0.6180339887498949 + member * 0.4142135623730951)[0]
    return np.floor(place * (last[target.rank_class] + 1)).astype(np.int64)


def _conversions(catalog: Catalog, source: Layout, target: Layout) -> tuple[tuple[str, str], ...]:
    """Return the (trainer dtype, engine dtype) pairs that differ. The sender casts while
    packing."""
    have = {dtype for rank in source.classes for dtype in rank.dtypes}
    need = {dtype for rank in target.classes for dtype in rank.dtypes}
    bad = sorted((have - {*CASTS}) | (need - {*CASTS, FP8}))
    if bad:
        raise WeightSyncError(
            f"no conversion between {', '.join(bad)} and the other side's dtypes; supported: "
            f"casts among {', '.join(CASTS)} and from these to block-wise {FP8}"
        )
    problem = next(_fp8_faults(catalog, target), None)
    if problem is not None:
        raise WeightSyncError(
            f"{problem}; add the scales of the model's quantization_config to the catalog, or "
            "serve in bfloat16"
        )
    return tuple((a, b) for a, b in product(sorted(have), sorted(need)) if a != b)


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
        for tensors, wanted, problem in rules:
            allowed = np.array([dtype in wanted for dtype in rank.dtypes], dtype=bool)
            wrong = (rank.tensor != PADDING) & tensors[rank.tensor] & ~allowed[rank.buffer]
            for row in np.flatnonzero(wrong)[:1].tolist():
                yield (
                    f"the engine's {rank.names[int(rank.buffer[row])]} {problem} "
                    f"({catalog.names[int(rank.tensor[row])]})"
                )
