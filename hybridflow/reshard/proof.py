"""Prove a slice plan before a byte moves, from its data alone and by other means than the planner's.

Shown: every element of every engine buffer is written exactly once or is declared padding; every slice comes whole from
a region that its sender holds; every engine rank of a class is served once; every HF tensor is used whole by every
engine, or named as unused; fused tensors travel in one bucket; no bucket is larger than it may be; senders hold all of
the blocks that they make fp8 and scales of, and an engine that takes a weight in fp8 takes its scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models.fp8 import FP8
from hybridflow.reshard import regions as boxes
from hybridflow.reshard.fp8_blocks import Quantised, blocks_of_scales, enclosing
from hybridflow.reshard.layout import PADDING, Catalog, Layout, padded
from hybridflow.reshard.planner import CASTS, fp8_faults, group_rows
from hybridflow.reshard.slices import SlicePlan, piece_columns

_SHOWN = 5


@dataclass(frozen=True)
class Proof:
    """What was shown: number of slices and target elements, elements of padding, HF tensors that no engine takes, the
    plan's hash."""

    slices: int
    elements: int
    padding: int
    unused: tuple[str, ...]
    digest: str


def prove(plan: SlicePlan, allow_unused: Collection[str] = ()) -> Proof:
    """Check the plan.

    Args:
        allow_unused: HF tensors that the engines need not take.

    Raises:
        WeightSyncError: the first few faults, each with buffer, tensor or rank.
    """
    faults = [*_buffer_faults("engine", plan.target), *_buffer_faults("trainer", plan.source)]
    faults += [
        *_bounds_faults("engine", plan.catalog, plan.target),
        *_bounds_faults("trainer", plan.catalog, plan.source),
    ]
    _refuse(faults)  # the checks below rely on the tables being sound
    faults += [
        *_piece_faults(plan),
        *_sender_faults(plan),
        *_service_faults(plan),
        *_bucket_faults(plan),
        *_dtype_faults(plan),
    ]
    faults += _block_faults(plan)
    unused, partial = tensor_use(plan.catalog, plan.target)
    faults += [f"an engine takes only a part of {name}" for name in partial]
    faults += [
        f"no part of {name} is taken by some engine; leave it out of the model or allow it"
        for name in unused
        if name not in allow_unused
    ]
    _refuse(faults)
    padding = sum(int(boxes.volumes(rank.size[rank.tensor == PADDING]).sum()) for rank in plan.target.classes)
    elements = sum(int(boxes.volumes(rank.shapes).sum()) for rank in plan.target.classes)
    return Proof(len(plan.deliveries.start), elements, padding, tuple(unused), plan.digest())


def compare_buffers(layout: Mapping[str, Sequence[int]], actual: Mapping[str, Sequence[int]], where: str) -> None:
    """Refuse an engine rank whose buffers are not those of its layout: extra and missing ones are listed by name.

    Raises:
        WeightSyncError: as described; `where` names the engine and rank.
    """
    extra, missing = sorted(actual.keys() - layout.keys()), sorted(layout.keys() - actual.keys())
    unlike = sorted(n for n in layout.keys() & actual.keys() if padded(layout[n], 1) != padded(actual[n], 1))
    if extra or missing or unlike:
        raise WeightSyncError(
            f"{where}: the engine's buffers are not those of the layout: extra {extra[:_SHOWN]}, missing "
            f"{missing[:_SHOWN]}, "
            f"of another shape {[(n, tuple(layout[n]), tuple(actual[n])) for n in unlike[:_SHOWN]]}"
        )


def tensor_use(catalog: Catalog, target: Layout) -> tuple[list[str], list[str]]:
    """HF tensors of which some engine takes (nothing, only a part). Scales are asked for only by engines that take the
    weight in fp8."""
    pieces, table = piece_columns(target), Quantised.of(catalog)
    in_fp8 = _pieces_in_fp8(target)
    kinds = {
        tuple(np.unique(target.rank_class[target.replica == replica]).tolist()) for replica in np.unique(target.replica)
    }
    unused: set[int] = set()
    partial: set[int] = set()
    full = boxes.volumes(catalog.shapes)
    for kind in sorted(kinds):
        mine = np.isin(pieces["class"], kind)
        tensor, start, size = pieces["tensor"][mine], pieces["start"][mine], pieces["size"][mine]
        first, _ = group_rows(np.column_stack([tensor, start, size]))
        owner, _, parts = boxes.make_disjoint(tensor[first], start[first], size[first])
        taken = np.zeros(len(full), dtype=np.int64)
        np.add.at(taken, tensor[first][owner], boxes.volumes(parts))
        asked = (table.weight_of < 0) | np.isin(table.weight_of, pieces["tensor"][mine & in_fp8])
        unused |= set(np.flatnonzero((taken == 0) & asked).tolist())
        partial |= set(np.flatnonzero((taken != full) & (taken > 0)).tolist())
    return [catalog.names[t] for t in sorted(unused)], [catalog.names[t] for t in sorted(partial)]


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        more = f" (and {len(faults) - _SHOWN} more)" if len(faults) > _SHOWN else ""
        raise WeightSyncError(f"the slice plan cannot be proven: {'; '.join(faults[:_SHOWN])}{more}")


def _buffer_faults(side: str, layout: Layout) -> Iterator[str]:
    """Buffers whose pieces and declared padding do not fill them exactly once."""
    first = np.cumsum([0, *(len(rank.names) for rank in layout.classes)])
    key = np.concatenate([rank.buffer + offset for rank, offset in zip(layout.classes, first[:-1], strict=True)])
    local, size = (np.concatenate([getattr(rank, name) for rank in layout.classes]) for name in ("local", "size"))
    shapes = np.concatenate([rank.shapes for rank in layout.classes])
    for fault in boxes.cover_faults(key, local, size, shapes):
        number = int(np.searchsorted(first, fault.key, side="right")) - 1
        rank = int(np.flatnonzero(layout.rank_class == number)[0])
        name = layout.classes[number].names[fault.key - int(first[number])]
        problem = {
            "beyond": "a piece reaches beyond it",
            "overlap": f"{fault.elements} pairs of pieces overlap",
            "missing": f"{fault.elements} elements are not written",
        }[fault.kind]
        yield f"{side} rank {rank}, {name}: {problem}"


def _bounds_faults(side: str, catalog: Catalog, layout: Layout) -> Iterator[str]:
    pieces = piece_columns(layout)
    beyond = (
        (pieces["start"] < 0)
        | (pieces["start"] + pieces["size"] > catalog.shapes[pieces["tensor"]])
        | (pieces["size"] < 1)
    )
    for row in np.flatnonzero(beyond.any(axis=1))[:_SHOWN].tolist():
        yield f"{side}: a piece of {catalog.names[int(pieces['tensor'][row])]} is empty or reaches beyond the tensor"


def _piece_faults(plan: SlicePlan) -> Iterator[str]:
    """Pieces that the deliveries do not fill exactly once."""
    table = plan.deliveries
    first = np.cumsum([0, *(len(rank.tensor) for rank in plan.target.classes)])
    tensor, start, size = (
        np.concatenate([getattr(rank, n) for rank in plan.target.classes]) for n in ("tensor", "start", "size")
    )
    piece = first[table.receiver] + table.piece
    bounds = np.where((tensor == PADDING)[:, None], 0, size)
    for fault in boxes.cover_faults(piece, table.start - start[piece], table.size, bounds):
        number = int(np.searchsorted(first, fault.key, side="right")) - 1
        layout, row = plan.target.classes[number], fault.key - int(first[number])
        name = layout.names[int(layout.buffer[row])]
        yield (
            f"the slices for {name} of engine class {number} from {plan.catalog.names[int(tensor[fault.key])]}: "
            f"{fault.kind}"
        )


def _sender_faults(plan: SlicePlan) -> Iterator[str]:
    """Slices that are cut from elsewhere than a region of the tensor that their sender holds."""
    table, regions, sends = plan.deliveries, plan.regions, plan.sends
    wanted = np.concatenate([rank.tensor for rank in plan.target.classes])
    first = np.cumsum([0, *(len(rank.tensor) for rank in plan.target.classes)])
    tensor = wanted[first[table.receiver] + table.piece]
    offset = table.start - regions.start[table.region]
    outside = (offset < 0).any(axis=1) | (offset + table.size > regions.size[table.region]).any(axis=1)
    for row in np.flatnonzero(outside | (regions.tensor[table.region] != tensor))[:_SHOWN].tolist():
        yield f"slice {row} of {plan.catalog.names[int(tensor[row])]} is not inside the region that it is cut from"
    have = piece_columns(plan.source)
    rows = np.concatenate(
        [
            np.column_stack([have["tensor"], have["start"], have["size"]]),
            np.column_stack([regions.tensor, regions.start, regions.size]),
        ]
    )
    _, same = group_rows(rows)
    held, region = same[: len(have["tensor"])], same[len(have["tensor"]) :]
    width = int(same.max(initial=0)) + 1
    keys = np.unique(have["class"] * width + held)
    asked = plan.source.rank_class[sends.source] * width + region[table.region[sends.delivery]]
    for row in np.flatnonzero(~np.isin(asked, keys))[:_SHOWN].tolist():
        name = plan.catalog.names[int(tensor[sends.delivery[row]])]
        yield f"trainer rank {int(sends.source[row])} is to send a slice of {name} that it does not hold"


def _service_faults(plan: SlicePlan) -> Iterator[str]:
    """Deliveries that some rank of the class gets twice or not at all."""
    sends, table = plan.sends, plan.deliveries
    counts = np.bincount(plan.target.rank_class, minlength=len(plan.target.classes))[table.receiver]
    faults = boxes.cover_faults(
        sends.delivery, sends.first[:, None], (sends.last - sends.first)[:, None], counts[:, None]
    )
    for fault in faults:
        yield (
            f"delivery {fault.key} does not reach each of its {int(counts[fault.key])} engine ranks once ({fault.kind})"
        )


def _bucket_faults(plan: SlicePlan) -> Iterator[str]:
    table = plan.deliveries
    width = int(table.bucket.max(initial=0)) + 1
    filled = np.zeros(len(plan.target.classes) * width, dtype=np.int64)
    np.add.at(filled, table.receiver * width + table.bucket, table.nbytes)
    for key in np.flatnonzero(filled > plan.bucket_bytes)[:_SHOWN].tolist():
        yield (
            f"bucket {key % width} of engine class {key // width} has {int(filled[key])} bytes, more than "
            f"{plan.bucket_bytes}"
        )
    first = np.cumsum([0, *(len(rank.tensor) for rank in plan.target.classes)])
    columns = {
        n: np.concatenate([getattr(rank, n) for rank in plan.target.classes]) for n in ("tensor", "buffer", "local")
    }
    piece = first[table.receiver] + table.piece
    _, atom = group_rows(np.column_stack([table.receiver, columns["buffer"][piece], columns["local"][piece, 0]]))
    tensors, buckets = (
        np.bincount(atom[group_rows(np.column_stack([atom, x]))[0]]) for x in (columns["tensor"][piece], table.bucket)
    )
    for number in np.flatnonzero((tensors > 1) & (buckets > 1))[:_SHOWN].tolist():
        row = int(np.flatnonzero(atom == number)[0])
        layout = plan.target.classes[int(table.receiver[row])]
        yield f"the fused engine tensor {layout.names[int(layout.buffer[table.piece[row]])]} is split over buckets"


def _dtype_faults(plan: SlicePlan) -> Iterator[str]:
    for layout, known in ((plan.source, {*CASTS}), (plan.target, {*CASTS, FP8})):
        for kind in sorted({dtype for rank in layout.classes for dtype in rank.dtypes} - known):
            yield f"no conversion for dtype {kind}"
    yield from fp8_faults(plan.catalog, plan.target)


def _pieces_in_fp8(target: Layout) -> np.ndarray:
    """Which rows of `piece_columns(target)` lie in buffers of fp8."""
    flags = [
        np.array([dtype == FP8 for dtype in rank.dtypes], dtype=bool)[rank.buffer[rank.tensor != PADDING]]
        for rank in target.classes
    ]
    return np.concatenate(flags)


def _block_faults(plan: SlicePlan) -> Iterator[str]:
    """Scales and fp8 weights that their senders could not make: a block that is not all theirs."""
    catalog, table = plan.catalog, Quantised.of(plan.catalog)
    for number, rank in enumerate(plan.source.classes):
        weights, scales = table.weight_rows(rank.tensor), table.scale_rows(rank.tensor)
        wanted = rank.tensor[scales]
        weight = table.weight_of[wanted]
        start, size = blocks_of_scales(
            rank.start[scales], rank.size[scales], table.block[wanted], catalog.shapes[weight]
        )
        first = int(np.flatnonzero(plan.source.rank_class == number)[0])
        if len(weights) != len(scales):
            yield f"trainer rank {first} has {len(weights)} pieces of weights with scales and {len(scales)} of scales"
            continue
        unlike = (
            (rank.tensor[weights] != weight)
            | (rank.start[weights] != start).any(axis=1)
            | (rank.size[weights] != size).any(axis=1)
        )
        for row in np.flatnonzero(unlike)[:_SHOWN].tolist():
            yield f"trainer rank {first} does not hold the weights of its part of {catalog.names[int(wanted[row])]}"
    regions, rows = plan.regions, np.flatnonzero(_deliveries_in_fp8(plan))
    region = plan.deliveries.region[rows]
    tensor = regions.tensor[region]
    start, size = enclosing(
        plan.deliveries.start[rows], plan.deliveries.size[rows], table.block[tensor], catalog.shapes[tensor]
    )
    low, high = regions.start[region], regions.start[region] + regions.size[region]
    for row in np.flatnonzero(((start < low) | (start + size > high)).any(axis=1))[:_SHOWN].tolist():
        yield (
            f"slice {int(rows[row])} of {catalog.names[int(tensor[row])]} needs fp8 blocks that reach beyond the "
            f"region it is made of"
        )


def _deliveries_in_fp8(plan: SlicePlan) -> np.ndarray:
    first = np.cumsum([0, *(len(rank.tensor) for rank in plan.target.classes)])
    flags = [np.array([dtype == FP8 for dtype in rank.dtypes], dtype=bool)[rank.buffer] for rank in plan.target.classes]
    return np.concatenate(flags)[first[plan.deliveries.receiver] + plan.deliveries.piece]
