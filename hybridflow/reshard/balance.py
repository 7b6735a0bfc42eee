"""Assigns each slice to one of the ranks that hold it, such that the load of the busiest sender is
minimal.
"""

from __future__ import annotations

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
    of_region = np.empty(len(regions.tensor), dtype=np.int64)
    sets: list[Array] = []
    offsets = regions.offsets.tolist()
    for region in range(len(regions.tensor)):
        classes = regions.holders[offsets[region] : offsets[region + 1]]
        key = classes.tobytes()
        if key not in known:
            known[key] = len(sets)
            sets.append(np.sort(np.concatenate([members[number] for number in classes.tolist()])))
        of_region[region] = known[key]
    return sets, of_region


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
    parts: list[tuple[Array, Array, Array, Array]] = []
    for number in sorted(range(len(sets)), key=lambda n: (len(sets[n]), n)):
        rows = order[bounds[number] : bounds[number + 1]]
        if len(rows):
            parts.append(
                _share(
                    rows, table.nbytes[rows], receivers[table.receiver[rows]], sets[number], load
                )
            )
    columns = (
        list(map(np.concatenate, zip(*parts, strict=True)))
        if parts
        else [np.empty(0, dtype=np.int64)] * 4
    )
    by_row = np.lexsort((columns[2], columns[0]))
    return Sends(*(column[by_row] for column in columns))


def _share(
    rows: Array, nbytes: Array, counts: Array, ranks: Array, load: Array
) -> tuple[Array, Array, Array, Array]:
    """Distribute the messages of all rows among `ranks`, and add their bytes to `load`. Each row
    consists of `counts` messages of `nbytes` bytes.

    Returns (row, rank, first, last) for each run.
    """
    weight = nbytes * counts
    target = np.cumsum(_fill(load[ranks], float(weight.sum())))
    ends = np.cumsum(weight)
    unit_first = np.concatenate([[0], np.cumsum(counts)])
    # a cut at byte x falls within row r, between two of its receivers
    cut_row = np.minimum(np.searchsorted(ends, target[:-1], side="right"), len(rows) - 1)
    into = (target[:-1] - (ends - weight)[cut_row]) / np.maximum(nbytes[cut_row], 1)
    cuts = unit_first[cut_row] + np.clip(np.rint(into), 0, counts[cut_row]).astype(np.int64)
    begins = np.union1d(unit_first[:-1], cuts)
    begins = begins[begins < unit_first[-1]]
    stops = np.append(begins[1:], unit_first[-1])
    row = np.searchsorted(unit_first, begins, side="right") - 1
    sender = np.searchsorted(cuts, begins, side="right")
    np.add.at(load, ranks[sender], nbytes[row] * (stops - begins))
    return rows[row], ranks[sender], begins - unit_first[row], stops - unit_first[row]


def _fill(load: Array, amount: float) -> Array:
    """Distribute `amount` over the entries of `load` so as to even them out. Returns each entry's
    share.
    """
    ordered = np.sort(load)
    levels = (amount + np.cumsum(ordered)) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(levels > ordered)[-1]] if amount > 0 else ordered[0]
    return np.maximum(level - load, 0.0)
