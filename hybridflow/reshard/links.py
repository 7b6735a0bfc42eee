"""Bytes that a plan sends over each link, and a lower bound for the busiest link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridflow.reshard.balance import holder_sets
from hybridflow.reshard.slices import SlicePlan


@dataclass(frozen=True)
class LinkLoads:
    """Bytes sent and received by each rank.

    Attributes:
        egress: `[source ranks]` bytes sent.
        ingress: `[target ranks]` bytes received.
        packed: `[source ranks]` bytes of distinct slices. A slice with several receivers counts
            once per sender.
        bound: lower bound on the busiest link's bytes over all assignments of senders.
    """

    egress: np.ndarray
    ingress: np.ndarray
    packed: np.ndarray
    bound: float

    @property
    def hottest(self) -> int:
        """Bytes on the busiest link."""
        sent = self.egress.max(initial=0)
        received = self.ingress.max(initial=0)
        return int(max(sent, received))

    @property
    def total(self) -> int:
        """Total bytes on the wire."""
        return int(self.ingress.sum())


def link_loads(plan: SlicePlan) -> LinkLoads:
    """Count the bytes that each rank sends and receives under the plan."""
    table = plan.deliveries
    sends = plan.sends
    per_class = np.zeros(len(plan.target.classes), dtype=np.int64)
    np.add.at(per_class, table.receiver, table.nbytes)
    ingress = per_class[plan.target.rank_class]
    egress = np.zeros(plan.source.num_ranks, dtype=np.int64)
    nbytes = table.nbytes[sends.delivery]
    receivers = sends.last - sends.first
    np.add.at(egress, sends.source, nbytes * receivers)
    packed = np.zeros_like(egress)
    num_slices = int(table.slice_id.max(initial=0)) + 1
    slice_of_sender = sends.source * num_slices + table.slice_id[sends.delivery]
    _, first = np.unique(slice_of_sender, return_index=True)
    np.add.at(packed, sends.source[first], nbytes[first])
    ingress_bound = float(ingress.max(initial=0))
    bound = max(ingress_bound, egress_bound(plan))
    return LinkLoads(egress, ingress, packed, bound)


def egress_bound(plan: SlicePlan) -> float:
    """Return a lower bound on the busiest sender's bytes.

    For each set of ranks that hold a region, divide the bytes that only ranks in the set can send
    by the size of the set. The bound is the maximum over all sets.
    """
    sets, of_region = holder_sets(plan.regions, plan.source)
    table = plan.deliveries
    receivers = plan.target.ranks_per_class()[table.receiver]
    amount = np.zeros(len(sets), dtype=np.int64)
    np.add.at(amount, of_region[table.region], table.nbytes * receivers)
    masks = []
    for ranks in sets:
        bits = np.zeros(plan.source.num_ranks, dtype=np.uint8)
        bits[ranks] = 1
        masks.append(int.from_bytes(np.packbits(bits).tobytes(), "big"))
    bound = float(amount.sum()) / max(plan.source.num_ranks, 1)
    amounts = amount.tolist()
    for mask, ranks in zip(masks, sets, strict=True):
        inside = 0
        for other, nbytes in zip(masks, amounts, strict=True):
            if other & ~mask == 0:
                inside += nbytes
        bound = max(bound, inside / len(ranks))
    return bound


def staging_peak(plan: SlicePlan) -> tuple[int, int]:
    """Return the peak staging bytes of the busiest sender and of the busiest receiver, with two
    messages or two buckets in flight."""
    table = plan.deliveries
    sends = plan.sends
    width = int(table.bucket.max(initial=0)) + 1
    bucket = table.receiver * width + table.bucket
    buckets = np.zeros(len(plan.target.classes) * width, dtype=np.int64)
    np.add.at(buckets, bucket, table.nbytes)
    # upper bound on a sender's message to one receiver: everything in the bucket that it sends to
    # the receiver's class
    row = sends.delivery
    bucket_of_sender = sends.source * len(buckets) + bucket[row]
    distinct, message = np.unique(bucket_of_sender, return_inverse=True)
    messages = np.zeros_like(distinct)
    np.add.at(messages, message, table.nbytes[row])
    return 2 * int(messages.max(initial=0)), 2 * int(buckets.max(initial=0))
