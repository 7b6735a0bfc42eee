"""Putting the token columns that the driver itself makes into the object store: they are sent once, however many calls
read them."""

from __future__ import annotations

import sys

from hybridflow.batch import DataProto
from hybridflow.batch.columns import Deferred, lengths_of
from hybridflow.single_controller.pieces import Header
from hybridflow.single_controller.stored import INLINE_BYTES, Origin, Part, StoredColumn


def keep_in_store(batch: DataProto) -> DataProto:
    """The batch with its jagged columns above 64 KiB in the object store. Without a running cluster (tests of the loop)
    as it is."""
    ray = sys.modules.get("ray")  # not imported for this: Cluster.start must be the first to do so
    if ray is None or not ray.is_initialized():
        return batch
    jagged = [
        name for name, column in batch.items() if not isinstance(column, Deferred) and lengths_of(column) is not None
    ]
    large = [name for name in jagged if batch.select([name]).nbytes > INLINE_BYTES]
    kept = {}
    for name in large:
        alone = DataProto(dict(batch.select([name]).items()), {}, batch.bfloat16 & {name})
        origin = Origin(None, {0: Header.of(alone)})
        kept[name] = StoredColumn.whole(Part(ray.put(alone), len(batch), name, 0, origin))
    return DataProto({**dict(batch.items()), **kept}, batch.meta, batch.bfloat16 - set(large))
