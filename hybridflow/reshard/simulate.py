"""Simulates a plan on modelled links, to predict its duration and its bottleneck.

Every rank has one full-duplex link with a given bandwidth. A sender sends its messages one after
another in the plan's order, each as soon as its receiver has a free buffer. A receiver has two
bucket buffers; each is freed once its contents have been scattered. A bucket is complete when its
last message has arrived, but not before the receiver's link has had time to carry the whole bucket.
The switch is assumed to be non-blocking.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.links import LinkLoads, link_loads, staging_peak
from hybridflow.reshard.regions import group_rows, ranges
from hybridflow.reshard.slices import SlicePlan


@dataclass(frozen=True)
class Fabric:
    """Hardware speeds: link Gb/s per direction, latency per message in microseconds, and memory
    bandwidth in GB/s (a copy counts as a read and a write)."""

    link_gbps: float = 400.0
    message_us: float = 20.0
    memory_gbs: float = 2000.0

    def __post_init__(self) -> None:
        if min(self.link_gbps, self.memory_gbs) <= 0 or self.message_us < 0:
            raise WeightSyncError(f"link and memory speeds must be positive, got {self}")

    @property
    def link_bytes(self) -> float:
        """Bytes per second over one link."""
        return self.link_gbps * 1e9 / 8


@dataclass(frozen=True)
class Simulation:
    """Results of one simulated sync, with times in seconds and sizes in bytes."""

    seconds: float
    wire_bound_s: float
    commit_s: float
    messages: int
    loads: LinkLoads
    sender_staging: int
    receiver_staging: int

    @property
    def wire_share(self) -> float:
        """Achieved fraction of the wire-bound speed, from 0 to 1."""
        return self.wire_bound_s / self.seconds if self.seconds else 1.0

    def figures(self) -> dict[str, float]:
        """Return all results, keyed by name."""
        loads = self.loads
        return {
            "wire_bytes": loads.total,
            "hottest_link_bytes": loads.hottest,
            "hottest_link_bound_bytes": loads.bound,
            "hottest_link_ratio": loads.hottest / loads.bound if loads.bound else 1.0,
            "sender_bytes_max": int(loads.egress.max(initial=0)),
            "sender_bytes_min": int(loads.egress.min()) if len(loads.egress) else 0,
            "receiver_bytes_max": int(loads.ingress.max(initial=0)),
            "packed_bytes_max": int(loads.packed.max(initial=0)),
            "sender_staging_bytes": self.sender_staging,
            "receiver_staging_bytes": self.receiver_staging,
            "messages": self.messages,
            "seconds": self.seconds,
            "wire_bound_s": self.wire_bound_s,
            "wire_share": self.wire_share,
            "commit_s": self.commit_s,
        }


def simulate(plan: SlicePlan, fabric: Fabric) -> Simulation:
    """Simulate the plan.

    `commit_s`, the time to copy a staged shard into place once all ranks have received everything,
    is not part of `seconds`.
    """
    step, sender, receiver, nbytes = _messages(plan)
    loads = link_loads(plan)
    memory_bytes = fabric.memory_gbs * 1e9
    latency = fabric.message_us * 1e-6
    finish = np.zeros(plan.target.num_ranks)  # arrival time of the last bucket's bytes
    free = np.zeros((2, plan.target.num_ranks))  # time at which each of the two buffers is free
    sender_free = np.zeros(plan.source.num_ranks)
    bounds = np.flatnonzero(np.diff(step, prepend=-1, append=-2))
    for turn, (low, high) in enumerate(pairwise(bounds.tolist())):
        s = sender[low:high]
        r = receiver[low:high]
        amount = nbytes[low:high]
        ready = free[turn % 2]
        duration = amount / fabric.link_bytes + latency
        end = _send(s, sender_free, ready[r], duration)
        carried = np.bincount(r, weights=amount, minlength=len(finish))
        got = carried > 0
        arrival = np.maximum(finish, ready) + carried / fabric.link_bytes
        np.maximum.at(arrival, r, end)
        finish = np.where(got, arrival, finish)
        scattered = finish + 2 * carried / memory_bytes
        free[turn % 2] = np.where(got, scattered, ready)
    seconds = float(free.max(initial=0.0))
    commit = 2 * float(loads.ingress.max(initial=0)) / memory_bytes
    wire_bound = loads.bound / fabric.link_bytes
    return Simulation(seconds, wire_bound, commit, len(step), loads, *staging_peak(plan))


def _send(
    sender: np.ndarray, sender_free: np.ndarray, ready: np.ndarray, duration: np.ndarray
) -> np.ndarray:
    """Return the time at which each message is fully sent, and update `sender_free`.

    A sender's messages (adjacent rows) are sent one after another.
    """
    is_first = np.diff(sender, prepend=-1) != 0
    segment = np.cumsum(is_first) - 1
    before = np.cumsum(duration) - duration
    before -= before[is_first][segment]
    # The recurrence e_m = max(e_{m-1}, ready_m) + d_m has the solution e_m = (sum of d up to m) +
    # running maximum of (ready_j - sum of d before j).
    slack = np.maximum(ready, sender_free[sender]) - before
    spread = float(slack.max(initial=0.0)) - float(slack.min(initial=0.0))
    step_up = (spread + 1.0) * segment
    start = np.maximum.accumulate(slack + step_up) - step_up
    end = start + before + duration
    np.maximum.at(sender_free, sender, end)
    return end


def _messages(plan: SlicePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (step, sender, receiver, bytes) of all messages, ordered by (step, sender,
    receiver)."""
    table = plan.deliveries
    sends = plan.sends
    rank_class = plan.target.rank_class
    num_classes = len(plan.target.classes)
    # Slices from one rank to the same receivers in one bucket form one message. Sum them before
    # expanding to the receivers, because there may be thousands of receivers.
    delivery = sends.delivery
    columns = (
        sends.source,
        table.receiver[delivery],
        table.bucket[delivery],
        sends.first,
        sends.last,
    )
    route = np.stack(columns, axis=1)
    firsts, member = group_rows(route)
    sizes = np.bincount(member, weights=table.nbytes[delivery], minlength=len(firsts))
    source, receiver_class, bucket, low, high = route[firsts].T
    order = np.argsort(rank_class, kind="stable")
    first = np.searchsorted(rank_class[order], np.arange(num_classes))
    counts = high - low
    first_receiver = np.repeat(first[receiver_class] + low, counts)
    receiver = order[first_receiver + ranges(counts)]
    buckets = np.zeros(num_classes, dtype=np.int64)
    np.maximum.at(buckets, table.receiver, table.bucket + 1)
    after_phase = np.repeat(bucket, counts) - plan.phase[receiver]
    step = after_phase % buckets[rank_class[receiver]]
    link = step * plan.source.num_ranks + np.repeat(source, counts)
    key = link * plan.target.num_ranks + receiver
    distinct, group = np.unique(key, return_inverse=True)
    nbytes = np.bincount(group, weights=np.repeat(sizes, counts), minlength=len(distinct))
    link, receiver = np.divmod(distinct, plan.target.num_ranks)
    step, sender = np.divmod(link, plan.source.num_ranks)
    return step, sender, receiver, nbytes
