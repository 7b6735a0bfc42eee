"""Assigns each slice to one of the ranks that hold it, such that the load of the busiest sender is
minimal.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hybridflow.reshard.layout import Layout
from hybridflow.reshard.slices import Deliveries, Regions, Sends

Array = np.ndarray


def holder_sets(regions: Regions, source: Layout) -> tuple[list[Array], Array]:
    """Return the distinct sets of source ranks that hold a region, and for each region the index of
    its set."""
    members = []
    for number in range(len(source.classes)):
        members.append(np.flatnonzero(source.rank_class == number))
    known: dict[bytes, int] = {}
    numbers = []
    sets: list[Array] = []
    for first, last in pairwise(regions.offsets.tolist()):
        classes = regions.holders[first:last]
        key = classes.tobytes()
        if key not in known:
            known[key] = len(sets)
            ranks = np.concatenate([members[number] for number in classes.tolist()])
            sets.append(np.sort(ranks))
        numbers.append(known[key])
    return sets, np.array(numbers, dtype=np.int64)


def assign_sources(table: Deliveries, regions: Regions, source: Layout, receivers: Array) -> Sends:
    """Split every delivery among the ranks that hold its data.

    Holder sets are processed from small to large, so that large sets even out the loads left by
    small ones. Within a set, the ordered deliveries are cut into one consecutive run per rank,
    sized to level the ranks' loads. The unit of assignment is one receiver of one delivery. For
    nested sets (Megatron's data-parallel groups) the result is optimal to within one slice.

    Args:
        receivers: `[C]` number of target ranks per class.
    """
    sets, of_region = holder_sets(regions, source)
    load = np.zeros(source.num_ranks, dtype=np.float64)
    row_set = of_region[table.region]
    order = np.lexsort((table.receiver, table.slice_id, row_set))
    bounds = np.searchsorted(row_set[order], np.arange(len(sets) + 1))
    parts = [np.empty((4, 0), dtype=np.int64)]
    # the sort is stable: sets of the same size keep their order
    for number in sorted(range(len(sets)), key=lambda n: len(sets[n])):
        rows = order[bounds[number] : bounds[number + 1]]
        if len(rows):
            nbytes = table.nbytes[rows]
            counts = receivers[table.receiver[rows]]
            parts.append(_share(rows, nbytes, counts, sets[number], load))
    columns = np.concatenate(parts, axis=1)
    row, _, first, _ = columns
    by_row = np.lexsort((first, row))
    return Sends(*(column[by_row] for column in columns))


def _share(rows: Array, nbytes: Array, counts: Array, ranks: Array, load: Array) -> Array:
    """Distribute the messages of all rows among `ranks`, and add their bytes to `load`. Each row
    consists of `counts` messages of `nbytes` bytes.

    Returns `[4, runs]`: row, rank, first and last of each run.
    """
    weight = nbytes * counts
    ends = np.cumsum(weight)
    shares = _fill(load[ranks], float(weight.sum()))
    cut_bytes = np.cumsum(shares)[:-1]
    unit_ends = np.cumsum(counts)
    unit_first = unit_ends - counts
    # a cut at byte x falls within row r, between two of its receivers
    cut_row = np.searchsorted(ends, cut_bytes, side="right")
    cut_row = np.minimum(cut_row, len(rows) - 1)
    into = cut_bytes - (ends - weight)[cut_row]
    units = np.rint(into / np.maximum(nbytes[cut_row], 1))
    units = np.clip(units, 0, counts[cut_row]).astype(np.int64)
    cuts = unit_first[cut_row] + units
    total = unit_ends[-1]
    begins = np.union1d(unit_first, cuts)
    begins = begins[begins < total]
    stops = np.append(begins[1:], total)
    row = np.searchsorted(unit_ends, begins, side="right")
    sender = ranks[np.searchsorted(cuts, begins, side="right")]
    np.add.at(load, sender, nbytes[row] * (stops - begins))
    first = unit_first[row]
    return np.stack([rows[row], sender, begins - first, stops - first])


def _fill(load: Array, amount: float) -> Array:
    """Distribute `amount` over the entries of `load` so as to even them out. Returns each entry's
    share.
    """
    if amount <= 0:
        return np.zeros_like(load)
    ordered = np.sort(load)
    counts = np.arange(1, len(load) + 1)
    levels = (amount + np.cumsum(ordered)) / counts
    level = levels[levels > ordered][-1]
    return np.maximum(level - load, 0.0)
