"""Measures the NCCL bandwidth between the GPUs of different nodes, pair by pair.

Nodes exchange data in pairs, which change in every round of a round-robin tournament. A node whose
own link is slow is slow in each of its pairs, while its partners are slow in one of theirs; so the
best pair of a node is reported, and only the node with the slow link stands out.
"""

from __future__ import annotations

import json
import os
import secrets
from functools import partial

from hybridflow.bench.measurements.base import Place, Yields, measurement, synchronized
from hybridflow.bench.result import Metric, NotRun, measured
from hybridflow.bench.rounds import Call, interleaved
from hybridflow.device.platform import Platform
from hybridflow.launch import records
from hybridflow.launch.preflight import node_address
from hybridflow.placement.place import PORTS
from hybridflow.process.rendezvous import join_world, leave_world
from hybridflow.process.secret import VARIABLE
from hybridflow.single_controller.host import free_port, interface_of

BYTES = {"nccl": 256 << 20, "gloo": 8 << 20}
PAIRS = 3  # partners of each node
ROUNDS = 9
_WARM_UP = 2  # NCCL connects a pair in its first exchange
_TIMEOUT_S = 60.0


@measurement("fabric", "preflight", per_node=True, timeout_s=120)
def fabric(place: Place, backend: str = "") -> Yields:
    """bandwidth of NCCL from each GPU to the same GPU of other nodes, in both directions at once

    Args:
        backend: torch.distributed backend. The default is nccl; without a GPU, nothing is measured.
    """
    platform = Platform.detect()
    devices = platform.device_count()
    backend = backend or ("nccl" if devices else "")
    if not backend or len(place.nodes) < 2:
        lacking = "several nodes" if backend else "a GPU"
        yield NotRun("fabric", f"it needs {lacking}", place.node)
        return
    _join(place, backend)
    try:
        for device in range(max(devices, 1)):
            platform.set_device(device)
            name = f"fabric/GPU {device}" if devices else "fabric/CPU"
            yield _best_pair(place, backend, name, platform)
    finally:
        leave_world()


def partners(count: int) -> list[list[int]]:
    """Return the rounds of a tournament of `count` players: the partner of each player, or the
    player itself if it sits out. Any two players meet once.
    """
    size = count + count % 2
    rounds = []
    for turn in range(size - 1):
        pairs = []
        for one in range(count):
            # two players meet if their numbers sum to the turn, modulo `size - 1`
            other = (turn - one) % (size - 1)
            if one == size - 1:  # meets the player who would otherwise meet itself
                other = turn * (size // 2) % (size - 1)
            elif other == one:
                other = size - 1
            pairs.append(other if other < count else one)
        rounds.append(pairs)
    return rounds


def _join(place: Place, backend: str) -> None:
    """Join all nodes into one world, whose address and secret are in a folder that only this user
    can read.
    """
    where = place.folder / "fabric"
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = node_address(place.node, None)
    first = where / "first.json"
    if place.rank == 0:
        port = free_port(address, PORTS)
        secret = secrets.token_hex(32)
        records.write(first, {"address": address, "port": port, "secret": secret})
    place.meet("fabric-open")
    found = json.loads(first.read_text(encoding="utf-8"))
    os.environ |= {
        VARIABLE: found["secret"],
        "MASTER_ADDR": found["address"],
        "MASTER_PORT": str(found["port"]),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(len(place.nodes)),
        "GLOO_SOCKET_IFNAME": interface_of(address),
    }
    join_world(backend, _TIMEOUT_S)
    place.meet("fabric-joined")
    if place.rank == 0:
        first.unlink()


def _best_pair(place: Place, backend: str, name: str, platform: Platform) -> Metric:
    """Measure all pairs that include this node. Returns the bandwidth of its best pair in each
    round.
    """
    import torch
    import torch.distributed as dist

    device = platform.current_device()
    ours = torch.zeros(BYTES[backend], dtype=torch.uint8, device=device)
    theirs = torch.zeros_like(ours)

    def exchange(partner: int) -> None:
        if partner == place.rank:
            return
        send = dist.P2POp(dist.isend, ours, partner)
        receive = dist.P2POp(dist.irecv, theirs, partner)
        sides = [send, receive] if place.rank < partner else [receive, send]
        for work in dist.batch_isend_irecv(sides):
            work.wait()

    exchanges: dict[str, Call] = {}
    for pairs in partners(len(place.nodes))[:PAIRS]:
        partner = pairs[place.rank]
        exchanges[str(partner)] = synchronized(partial(exchange, partner))
    # otherwise a pair would also wait for its members' previous partners
    meet = synchronized(dist.barrier)
    seconds = interleaved(exchanges, ROUNDS, _WARM_UP, before=meet)
    seconds.pop(str(place.rank), None)  # this node paused
    fastest = [min(of_round) for of_round in zip(*seconds.values(), strict=True)]
    rates = [ours.nbytes / 1e9 / one for one in fastest]
    return measured(name, "GB/s", rates, "higher", bound=0.2)
