"""What each rank does in the tests of the transports: ranks 0..3 are the trainer's, the others the
engines'."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.errors import WeightSyncError
from hybridflow.models import family_of
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, Layout, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.slices import SlicePlan
from hybridflow.sync.messages import Messages
from hybridflow.sync.staging import ReceiveStaging, SendStaging, largest_message
from hybridflow.sync.stream import receive_stream, send_stream
from hybridflow.sync.transports import open_receiver, open_sender
from hybridflow.sync.transports.base import Endpoint, Payload
from tests.models import STREAM_MOE

TRAINERS = 4


def rank_and_store() -> tuple[int, str, int]:
    """This process's rank, and the store, which rank 0 serves."""
    from hybridflow.process.rendezvous import master_store

    rank = int(os.environ["RANK"])
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        globals()["_store"] = master_store(host, port, 60)  # as long as the process
    return rank, host, port


def line_up(name: str, world: int = TRAINERS + 3) -> None:
    """Wait until every process of the test is here: a fault before has let them drift apart by its
    deadline."""
    from hybridflow.process.rendezvous import client_store

    store = client_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60)
    store.set(f"line up/{name}/{os.environ['RANK']}", "")
    store.wait([f"line up/{name}/{rank}" for rank in range(world)], timedelta(seconds=120))


def _hold_store(name: str, rank: int, world: int = TRAINERS + 2) -> None:
    """Rank 0, whose end is the store's, waits until the others have had their answers from it."""
    from hybridflow.process.rendezvous import client_store

    store = client_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60)
    store.set(f"answered/{name}/{rank}", "")
    if rank == 0:
        store.wait([f"answered/{name}/{peer}" for peer in range(world)], timedelta(seconds=120))


def _note_end(session: str, rank: int) -> None:
    """Tell the rank that stands still in this session that this one has ended it."""
    from hybridflow.process.rendezvous import client_store

    client_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60).set(
        f"ended/{session}/{rank}", ""
    )


def _wait_for_others_to_end(session: str, world: int = TRAINERS + 2) -> None:
    from hybridflow.process.rendezvous import client_store

    others = [f"ended/{session}/{rank}" for rank in range(world) if rank != int(os.environ["RANK"])]
    client_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60).wait(
        others, timedelta(seconds=120)
    )


class Case:
    """A plan of the tiny MoE, and the weights that it carries: a value of its own for every
    element, another in every version."""

    def __init__(
        self,
        engines: list[EngineShape],
        trainer_dtype: str = "float32",
        engine_dtype: str = "float32",
        staging: int = 1 << 17,
        part: int = 0,
    ) -> None:
        self.family = family_of(STREAM_MOE)
        self.catalog = Catalog.of(self.family.tensors())
        source = megatron_layout(
            self.family,
            ParallelShape(TRAINERS, tensor=2, pipeline=2, expert=2).coordinates(),
            trainer_dtype,
        )
        self.plan: SlicePlan = make_plan(
            self.catalog, source, engine_layout(self.family, engines, engine_dtype), staging
        )
        self.messages = Messages(self.plan, part)
        self._weights: dict[tuple[int, int], torch.Tensor] = {}  # a tensor has many slices

    def weight(self, tensor: int, version: int) -> torch.Tensor:
        """One HF tensor; not to be written."""
        if (tensor, version) not in self._weights:
            seed = torch.Generator().manual_seed(1000 * version + tensor)
            self._weights[tensor, version] = torch.randn(
                self.catalog.shapes[tensor].tolist(), generator=seed
            )
        return self._weights[tensor, version]

    def buffers(self, layout: Layout, rank: int, version: int | None) -> dict[str, torch.Tensor]:
        """A rank's buffers with its slices of the weights, or with NaN; padding is zero."""
        mine = layout.classes[int(layout.rank_class[rank])]
        held = {
            name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=_device)
            for name, shape, dtype in zip(
                mine.names, mine.shapes.tolist(), mine.dtypes, strict=True
            )
        }
        for row, tensor in enumerate(mine.tensor.tolist()):
            place = held[mine.names[int(mine.buffer[row])]][box(mine.local[row], mine.size[row])]
            if tensor < 0:
                place.zero_()
            elif version is not None:
                place.copy_(self.weight(tensor, version)[box(mine.start[row], mine.size[row])])
        return held


def box(start: np.ndarray, size: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(int(s), int(s) + int(n)) for s, n in zip(start, size, strict=True))


# ---- what a sync brings
# --------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The largest storage that any operation made."""

    def __init__(self, known: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known.values()}
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in self.known
            ):
                made = "empty" in str(function)
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() if made else 0)
        return result


def entry_name(transport: str) -> str:
    """The name of a built-in transport, or of one in a file."""
    return transport.rpartition(":")[2]


def _peers_of_lender(transport: str, peers: tuple[int, ...]) -> int:
    """Peers that a rank has memory of its own for."""
    return 1 if entry_name(transport) in ("tcp", "p2p") else len(peers)


_device = torch.device("cpu")  # where all buffers of this process lie


def all_syncs(transports: list[str], folder: str, device: str = "cpu") -> Any:
    """Everything, transport after transport, in one start of seven processes; on a GPU all of them
    share the first."""
    global _device
    _device = torch.device(device)
    rank, host, port = rank_and_store()
    facts: dict[str, Any] = {}
    os.environ["DEVICE_TWIN_FOLDER"] = folder
    for transport in transports:
        line_up(f"{transport}, good")
        facts[transport] = {"good": _good_syncs(transport, rank, host, port)}
        # its faults are those of its two ways
        if rank < TRAINERS + 2 and entry_name(transport) != "two_nodes":
            facts[transport]["bad"] = _bad_syncs(transport, rank, host, port)
    _hold_store("everything", rank, TRAINERS + 3)
    return facts


def _good_syncs(transport: str, rank: int, host: str, port: int) -> Any:
    """Every layout and dtype, staged and in place, four versions on one session."""
    facts: dict[str, Any] = {}
    # whole buckets; parts in a few slots; parts and room for all of them
    for name, engines, dtypes, part, slots in (
        ("TP2", [EngineShape(tensor=2)], ("float32", "float32"), 0, 2),
        ("TP2 and TP1", [EngineShape(tensor=2), EngineShape()], ("float32", "float32"), 1 << 13, 5),
        (
            "TP2 and TP1 in bf16",
            [EngineShape(tensor=2), EngineShape()],
            ("float32", "bfloat16"),
            1 << 12,
            700,
        ),
    ):
        case = Case(engines, *dtypes, staging=1 << (16 if "bf16" in name else 17), part=part)
        receivers = tuple(range(case.plan.target.num_ranks))
        if rank >= TRAINERS + len(receivers):
            continue
        endpoint = Endpoint(
            transport,
            f"{transport}, {name}",
            host,
            port,
            (0, 1, 2, 3),
            receivers,
            case.plan.bucket_bytes,
            30.0,
            slots,
        )
        facts[name] = (
            _send_all(case, endpoint, rank)
            if rank < TRAINERS
            else _receive_all(case, endpoint, rank - TRAINERS)
        )
    gc.collect()
    facts["left"] = _left_behind()
    return facts


STAGED = (True, False, False, True)


def _send_all(case: Case, endpoint: Endpoint, rank: int) -> Any:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    channel = open_sender(endpoint, rank, _device)
    staging = SendStaging(rank, endpoint.slots)
    found = []
    messages = case.messages.outgoing(rank)
    live = case.buffers(case.plan.source, rank, 0)
    for version in range(len(STAGED)):
        for name, values in case.buffers(case.plan.source, rank, version).items():
            live[name].copy_(values)
        with Allocations(live) as allocations:
            stats = send_stream(messages, live, channel, staging)
        found.append(vars(stats) | {"largest_allocation": allocations.largest})
    channel.close()
    del channel, staging
    gc.collect()
    peers = _peers_of_lender(endpoint.transport, endpoint.receivers)
    bound = endpoint.slots * largest_message(messages) * peers
    return {"syncs": found, "bound": bound, "files": len(os.listdir("/proc/self/fd")) - files}


def _receive_all(case: Case, endpoint: Endpoint, rank: int) -> Any:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    channel = open_receiver(endpoint, rank, _device)
    staging = ReceiveStaging(rank, endpoint.slots)
    found = []
    messages = case.messages.incoming(rank)
    live = case.buffers(case.plan.target, rank, None)
    elements = {
        name: int(values.isnan().sum()) * values.element_size() for name, values in live.items()
    }
    whole = (
        max(int(np.prod(shape)) for shape in case.catalog.shapes.tolist())
        * next(iter(live.values())).element_size()
    )
    overhead = 64 * len(messages)
    for version, staged in enumerate(STAGED):
        before = {name: values.clone() for name, values in live.items()}
        with Allocations(live) as allocations:
            received = receive_stream(messages, channel, staging, staged, live)
        untouched = all(
            torch.equal(live[n].nan_to_num(9.0), before[n].nan_to_num(9.0)) for n in live
        )
        received.commit(live)
        want = case.buffers(case.plan.target, rank, version)
        peers = _peers_of_lender(endpoint.transport, endpoint.senders)
        found.append(
            vars(received.stats)
            | {
                "staged": staged,
                "untouched": untouched,
                "right": all(torch.equal(live[n], want[n]) for n in want),
                "largest_allocation": allocations.largest,
                "bound": overhead
                + (
                    sum(elements.values())
                    if staged
                    else endpoint.slots * largest_message(messages) * peers
                ),
            }
        )
        staging.release()
    channel.close()
    del channel, staging, received
    gc.collect()
    return {
        "syncs": found,
        "minimum": sum(elements.values()),
        "whole": whole,
        "files": len(os.listdir("/proc/self/fd")) - files,
    }


def _left_behind() -> list[str]:
    """Files and shared memory of sessions that are over."""
    maps = [
        line.split()[-2]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:hybridflow" in line
    ]
    return maps + [name for name in os.listdir("/dev/shm") if "hybridflow" in name]


# ---- what goes wrong
# --------------------------------------------------------------------------------------------------


class Meddler:
    """A sender's channel that does something to its n-th message."""

    def __init__(self, channel: Any, at: int, deed: str, session: str) -> None:
        self.channel = channel
        self.at = at
        self.deed = deed
        self.session = session
        self.count = 0

    def send(self, peer: int, tag: int, payload: Payload) -> Any:
        self.count += 1
        if self.count == self.at:
            if self.deed == "flip":
                payload = Payload(payload.tensor.clone())  # it may be the parameter itself
                payload.tensor[payload.nbytes // 2] ^= 1
            elif self.deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.deed == "stall":
                _wait_for_others_to_end(self.session)
        return self.channel.send(peer, tag, payload)


class MeddlingReceiver:
    """The same for a receiver."""

    def __init__(self, channel: Any, at: int, deed: str, session: str) -> None:
        self.channel = channel
        self.meddler = Meddler(self, at, deed, session)

    def send(self, peer: int, tag: int, payload: Payload) -> Any:
        return self.channel.receive(peer, tag, payload)

    def receive(self, peer: int, tag: int, into: Payload) -> Any:
        return self.meddler.send(peer, tag, into)


DEADLINE = 3.0
# only who stands still is known by its deadline; with files, so are those who wait for a rank that
# has given up
DEADLINES = {"flip": 10.0, "kill": 15.0, "stall": DEADLINE}
DEEDS = (
    ("flip", "trainer"),
    ("kill", "trainer"),
    ("kill", "engine"),
    ("stall", "trainer"),
    ("stall", "engine"),
)
BAD_TRAINER = 3
BAD_ENGINE = 1


def _bad_syncs(transport: str, rank: int, host: str, port: int) -> Any:
    """Each deed in a session of its own, then a good sync in another."""
    case = _case_of_faults()
    facts = {}
    for deed, side in DEEDS:
        endpoint = Endpoint(
            transport,
            f"{transport}, {deed} {side}",
            host,
            port,
            (0, 1, 2, 3),
            (0, 1),
            case.plan.bucket_bytes,
            DEADLINES[deed],
        )
        is_bad = rank == (BAD_TRAINER if side == "trainer" else TRAINERS + BAD_ENGINE)
        if is_bad and deed == "kill":
            facts[f"{deed} {side}"] = {"ended_by": _end_of_killed(case, endpoint, rank)}
        else:
            line_up(endpoint.session, TRAINERS + 2)
            facts[f"{deed} {side}"] = _take_part(case, endpoint, rank, deed, is_bad)
    line_up(f"{transport}, after", TRAINERS + 2)
    endpoint = Endpoint(
        transport,
        f"{transport}, after",
        host,
        port,
        (0, 1, 2, 3),
        (0, 1),
        case.plan.bucket_bytes,
        30.0,
    )
    facts["after"] = _take_part(case, endpoint, rank, "", False)
    facts["absent"] = _absent(transport, rank, host, port)
    _hold_store(f"{transport}, absent", rank)
    gc.collect()
    facts["left"] = _left_behind()
    return facts


def _case_of_faults() -> Case:
    return Case([EngineShape(tensor=2)], staging=1 << 16)


def _end_of_killed(case: Case, endpoint: Endpoint, rank: int) -> int:
    """How a process ended that stood for this rank until it killed itself."""
    if _device.type == "cpu":
        line_up(endpoint.session, TRAINERS + 2)
        child = os.fork()
        if child == 0:
            _take_part(case, endpoint, rank, "kill", True)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # a fork of a process that has used a GPU cannot use it
    order = json.dumps([str(_device), rank, astuple(endpoint)])
    code = f"import sys, {__name__} as cases; cases.be_killed(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", code, order], check=False).returncode


def be_killed(order: str) -> None:
    """Take part in a process of its own, once that is as ready as the others."""
    global _device
    device, rank, endpoint = json.loads(order)
    _device = torch.device(device)
    torch.zeros(1, device=_device)
    asked = Endpoint(*(tuple(part) if isinstance(part, list) else part for part in endpoint))
    case = _case_of_faults()
    line_up(asked.session, TRAINERS + 2)
    _take_part(case, asked, rank, "kill", True)


def _take_part(case: Case, endpoint: Endpoint, rank: int, deed: str, is_bad: bool) -> Any:
    start = time.monotonic()
    error = ""
    right = None
    opened = 0.0
    channel: Any = None
    try:
        if rank < TRAINERS:
            channel = open_sender(endpoint, rank, _device)
            opened = time.monotonic()
            used = Meddler(channel, 3, deed, endpoint.session) if is_bad else channel
            send_stream(
                case.messages.outgoing(rank),
                case.buffers(case.plan.source, rank, 1),
                used,
                SendStaging(rank),
            )
        else:
            engine = rank - TRAINERS
            channel = open_receiver(endpoint, engine, _device)
            opened = time.monotonic()
            used = MeddlingReceiver(channel, 3, deed, endpoint.session) if is_bad else channel
            live = case.buffers(case.plan.target, engine, None)
            receive_stream(
                case.messages.incoming(engine), used, ReceiveStaging(engine), True, live
            ).commit(live)
            want = case.buffers(case.plan.target, engine, 1)
            right = all(torch.equal(live[name], want[name]) for name in want)
    except WeightSyncError as caught:
        error = str(caught)
    took = time.monotonic() - (opened or start)
    if deed == "stall":
        _note_end(endpoint.session, rank)
    if channel is not None:
        if error:
            channel.abort()
            channel.abort()
        else:
            channel.close()
    return {"error": error, "seconds": took, "right": right}


def _absent(transport: str, rank: int, host: str, port: int) -> str:
    if rank not in (0, TRAINERS):
        return ""
    endpoint = Endpoint(transport, f"{transport}, absent", host, port, (0, 9), (0,), 1 << 10, 1.0)
    try:
        (open_sender if rank == 0 else open_receiver)(endpoint, 0)
    except WeightSyncError as error:
        return str(error)
    return "nothing was raised"
