"""Builds and proves a plan from the engines' layouts, and derives each rank's schedule from it.

The first trainer rank does this once, before the first step, and posts one schedule per rank. A
rank reads only its own messages, never the whole plan. All schedules contain the plan's digest,
which lets both ends verify that they use the same plan.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hybridflow.errors import WeightSyncError
from hybridflow.models import Family
from hybridflow.models.fp8 import BlockQuantisation
from hybridflow.models.served_adapters import ServedAdapters
from hybridflow.process.store import StoreClient
from hybridflow.reshard.layout import Catalog, Layout, RankLayout
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.proof import Proof, compare_buffers, prove
from hybridflow.reshard.slices import SlicePlan
from hybridflow.sync.messages import Item, Message, Messages
from hybridflow.sync.session import CATALOG_KEY, PLANS_KEY, read
from hybridflow.sync.staging import largest_message

SENDER = "sender"
RECEIVER = "receiver"


@dataclass(frozen=True)
class EngineLayout:
    """An engine's name and the layout digest of each of its ranks. The layouts are posted under
    `layout_key`."""

    name: str
    layouts: tuple[str, ...]


@dataclass(frozen=True)
class Schedule:
    """A rank's part of a plan: its layout and its messages, in order."""

    plan: str
    layout: RankLayout
    messages: tuple[Message, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as JSON-able data."""
        return {
            "plan": self.plan,
            "layout": self.layout.to_dict(),
            "messages": list(map(asdict, self.messages)),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """Rebuild a schedule from `to_dict`."""
        messages = []
        for message in data["messages"]:
            items = tuple(map(Item.from_dict, message["items"]))
            messages.append(Message(**{**message, "items": items}))
        return cls(data["plan"], RankLayout.from_dict(data["layout"]), tuple(messages))


@dataclass(frozen=True)
class PlanFacts:
    """Summary of a plan for the driver.

    Attributes:
        digest, slices, padding, unused: from the proof.
        nbytes: bytes on the wire, per engine.
        senders: per engine, the trainer ranks that send to it, in ascending order.
        receivers: per engine, its ranks as numbered in the plan.
        message_bytes: largest message, per engine.
        messages: per engine, the maximum number of messages between two ranks, including the one
            with checksums.
        adapters: the plan that sends only adapters, to engines that already have the weights; None
            if adapters are merged or there are none.
    """

    digest: str
    slices: int
    padding: int
    unused: tuple[str, ...]
    nbytes: tuple[int, ...]
    senders: tuple[tuple[int, ...], ...]
    receivers: tuple[tuple[int, ...], ...]
    message_bytes: tuple[int, ...]
    messages: tuple[int, ...]
    adapters: PlanFacts | None = None

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of all plans."""
        return (self.digest, *((self.adapters.digest,) if self.adapters else ()))

    def describe(self) -> str:
        """Format the plan's summary as one line."""
        total = sum(self.nbytes)
        unused = (
            f"{len(self.unused)} tensors unused ({', '.join(self.unused[:3])})"
            if self.unused
            else "no unused tensors"
        )
        return (
            f"weight sync plan {self.digest[:12]} proven: {self.slices} slices, {total / 1e6:.1f} "
            f"MB to {len(self.nbytes)} engines, {self.padding} elements of padding, {unused}"
            + (
                f"; adapters alone {sum(self.adapters.nbytes) / 1e6:.1f} MB"
                if self.adapters
                else ""
            )
        )


def layout_digest(layout: RankLayout) -> str:
    """Return the sha256 of a rank's layout."""
    return hashlib.sha256(json.dumps(layout.to_dict(), sort_keys=True).encode()).hexdigest()


def layout_key(digest: str) -> str:
    """Return the store key of a layout. Ranks with equal layouts share it."""
    return f"layout/{digest}"


def schedule_key(plan: str, side: str, rank: int) -> str:
    """Return the store key of a rank's schedule."""
    return f"schedule/{plan}/{side}/{rank}"


def post_layout(
    store: StoreClient, layout: RankLayout, parameters: Mapping[str, Sequence[int]]
) -> str:
    """Post an engine rank's layout with the shapes of all its parameters. Returns the digest."""
    digest = layout_digest(layout)
    posted = {"layout": layout.to_dict(), "parameters": {k: list(v) for k, v in parameters.items()}}
    store.set(layout_key(digest), json.dumps(posted))
    return digest


def engine_layout(store: StoreClient, engines: Sequence[EngineLayout], timeout_s: float) -> Layout:
    """Build the engines' side of the plan from the posted layouts.

    Raises:
        WeightSyncError: an engine's loader leaves a parameter unwritten. The message names the
            engine, rank and parameter.
    """
    classes: dict[str, RankLayout] = {}
    for engine in engines:
        for rank, digest in enumerate(engine.layouts):
            if digest in classes:
                continue
            posted = read(store, layout_key(digest), timeout_s)
            layout = RankLayout.from_dict(posted["layout"])
            held = dict(zip(layout.names, layout.shapes.tolist(), strict=True))
            buffers = {}
            for name, shape in held.items():
                if name not in posted["parameters"]:
                    buffers[name] = shape
            compare_buffers(held, posted["parameters"] | buffers, f"{engine.name} rank {rank}")
            classes[digest] = layout
    number = {digest: index for index, digest in enumerate(classes)}
    rank_class = []
    replica = []
    for index, engine in enumerate(engines):
        for digest in engine.layouts:
            rank_class.append(number[digest])
            replica.append(index)
    return Layout(
        tuple(classes.values()),
        np.array(rank_class, dtype=np.int64),
        np.array(replica, dtype=np.int64),
    )


def plan_and_prove(
    catalog: Catalog,
    source: Layout,
    target: Layout,
    staging_bytes: int,
    allow_unused: Collection[str] = (),
) -> tuple[SlicePlan, Proof]:
    """Make and prove a plan that lets a trainer rank serve all engines concurrently within
    `staging_bytes`.

    Raises:
        WeightSyncError: planning or the proof fails. The message names tensors, buffers or ranks.
    """
    engines = len(np.unique(target.replica))
    try:
        plan = make_plan(catalog, source, target, staging_bytes // engines)
    except WeightSyncError as error:
        hint = (
            f" (the planner's staging bytes are rollout.sync.staging_bytes={staging_bytes} / "
            f"{engines} engines)"
        )
        raise WeightSyncError(f"{error}{hint if 'staging bytes' in str(error) else ''}") from None
    return plan, prove(plan, allow_unused)


def post_schedules(
    store: StoreClient, plan: SlicePlan, proof: Proof, part_bytes: int = 0
) -> PlanFacts:
    """Post the schedules of all ranks on both sides. Returns the summary for the driver.

    `part_bytes` is passed to `Messages`.
    """
    messages = Messages(plan, part_bytes)
    digest = proof.digest
    engines = [
        tuple(np.flatnonzero(plan.target.replica == number).tolist())
        for number in np.unique(plan.target.replica)
    ]
    nbytes, largest, most = ([0] * len(engines) for _ in range(3))
    senders: list[set[int]] = [set() for _ in engines]

    def post(side: str, rank: int, layout: Layout, found: list[Message]) -> None:
        schedule = Schedule(digest, layout.classes[int(layout.rank_class[rank])], tuple(found))
        store.set(schedule_key(digest, side, rank), json.dumps(schedule.to_dict()))

    for rank in range(plan.source.num_ranks):
        post(SENDER, rank, plan.source, messages.outgoing(rank))
    for number, ranks in enumerate(engines):
        for rank in ranks:
            incoming = messages.incoming(rank)
            post(RECEIVER, rank, plan.target, incoming)
            nbytes[number] += sum(message.nbytes for message in incoming)
            largest[number] = max(largest[number], largest_message(incoming))
            counts = Counter(message.peer for message in incoming)
            most[number] = max([most[number], *(count + 1 for count in counts.values())])
            senders[number] |= counts.keys()
    return PlanFacts(
        digest=digest,
        slices=proof.slices,
        padding=proof.padding,
        unused=proof.unused,
        nbytes=tuple(nbytes),
        senders=tuple(tuple(sorted(ranks)) for ranks in senders),
        receivers=tuple(engines),
        message_bytes=tuple(largest),
        messages=tuple(most),
    )


def post_catalog(
    store: StoreClient,
    tensors: Mapping[str, Sequence[int]],
    dtype: str,
    quantisation: BlockQuantisation | None = None,
    adapters: ServedAdapters | None = None,
) -> None:
    """Post the catalog with which engines trace their loaders: the HF tensors {name: shape}, their
    scales if `quantisation` is given, and the adapters that engines store unmerged."""
    shapes, dtypes = quantisation.checkpoint(tensors) if quantisation is not None else (tensors, {})
    catalog = {
        "dtype": dtype,
        "dtypes": dtypes,
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "adapters": adapters.to_dict() if adapters else None,
    }
    store.set(CATALOG_KEY, json.dumps(catalog))


def make_weight_plan(
    store: StoreClient,
    family: Family,
    source: Layout,
    engines: Sequence[EngineLayout],
    staging_bytes: int,
    wait_s: float,
    part_bytes: int = 0,
    quantisation: BlockQuantisation | None = None,
    adapters: ServedAdapters | None = None,
) -> PlanFacts:
    """Make and prove the plan, and post every rank's schedule. If engines store adapters unmerged,
    do the same for a plan that sends only the adapters.

    Args:
        source: the trainer's layout, built on the same catalog (`sync_catalog`).
        engines: each engine's posted layouts, in the plan's order.
        staging_bytes: memory per rank for messages in flight.
        wait_s: timeout for each posted layout.
        part_bytes: size of a part, see `Messages`.
        quantisation: the engines' block-wise fp8 format, as posted in the catalog.
        adapters: the adapters that engines store unmerged, as posted in the catalog.

    Raises:
        WeightSyncError: planning or the proof fails.
    """
    catalog = sync_catalog(family, quantisation, adapters)
    target = engine_layout(store, engines, wait_s)
    plan, proof = plan_and_prove(catalog, source, target, staging_bytes)
    facts = post_schedules(store, plan, proof, part_bytes)
    if adapters is not None:
        first = len(catalog.names) - len(adapters.shapes)
        plan, proof = plan_and_prove(
            catalog.part(first), source.part(first), target.part(first), staging_bytes
        )
        facts = replace(facts, adapters=post_schedules(store, plan, proof, part_bytes))
    store.set(PLANS_KEY, json.dumps(facts.digests))
    return facts


def sync_catalog(
    family: Family,
    quantisation: BlockQuantisation | None = None,
    adapters: ServedAdapters | None = None,
) -> Catalog:
    """Return the tensors that both sides refer to: first the model's tensors, then the factors of
    adapters that engines store unmerged."""
    factors = adapters.shapes if adapters else {}
    return Catalog.of({**family.tensors(), **factors}, quantisation)
