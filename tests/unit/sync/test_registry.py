"""Transports from a file outside of the package: found by name, opened, and under the same contract
as the built-in ones."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hybridflow.config.load import load_config
from hybridflow.device.platform import Platform
from hybridflow.errors import ConfigError, WeightSyncError
from hybridflow.process.rendezvous import master_store
from hybridflow.sync.transports import open_receiver, open_sender, part_bytes, tcp
from hybridflow.sync.transports.base import TRANSPORTS, Endpoint, Payload
from hybridflow.trainer.check_devices import check_devices

HOST = "127.0.0.1"
MINE = '''
"""Messages as keys of the session's store."""
import time
from datetime import timedelta

import numpy as np
import torch

from hybridflow.sync.meeting import Member, PeerWatch, meet, refuse_device
from hybridflow.sync.transports.base import DONE, TRANSPORTS, Transport


class Keys:
    def __init__(self, member, device):
        refuse_device(member, device, "use p2p")
        self.member, meeting = member, meet(member)
        self.store, self.open, self.counts = meeting.store, True, dict.fromkeys(member.peers, 0)

    def _key(self, peer, tag):
        if not self.open:
            raise self.member.failure(peer, tag, "the session was already aborted")
        self.counts[peer] += 1
        pair = (self.member.rank, peer) if self.member.side == "trainer" else (peer, self.member.rank)
        return f"{pair[0]}-{pair[1]}-{self.counts[peer]}-{tag}"

    def send(self, peer, tag, payload):
        self.store.set(self._key(peer, tag), payload.tensor.numpy().tobytes())
        return DONE

    def receive(self, peer, tag, into):
        return Reading(self, peer, tag, self._key(peer, tag), into)

    def close(self):
        self.open = False

    abort = close


class Reading:
    def __init__(self, keys, peer, tag, key, into):
        self.keys, self.peer, self.tag, self.key, self.into = keys, peer, tag, key, into

    def wait(self):
        member = self.keys.member
        try:
            self.keys.store.wait([self.key], timedelta(seconds=member.endpoint.timeout_s))
        except RuntimeError as error:
            raise member.late(self.peer, self.tag) from error
        data = np.frombuffer(self.keys.store.get(self.key), dtype=np.uint8)
        self.into.tensor.copy_(torch.from_numpy(data.copy()))


def open_sender(endpoint, rank, device):
    return Keys(Member(endpoint, "trainer", rank), device)


def open_receiver(endpoint, rank, device):
    return Keys(Member(endpoint, "engine", rank), device)


TRANSPORTS.register("keys", Transport(open_sender, open_receiver, one_host=True, parts=2))
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a transport in a file of the user's."""
    file = tmp_path_factory.mktemp("mine") / "store_keys.py"
    file.write_text(MINE)
    return f"{file}:keys"


@pytest.fixture(scope="module")
def store() -> Any:
    return master_store(HOST, 0, 60)


@pytest.mark.parametrize(
    "name", ["mine", *(n for n in TRANSPORTS.names() if "cpu" in TRANSPORTS.get(n).devices)]
)
def test_the_contract_within_one_process(name: str, mine: str, store: Any) -> None:
    """Order, exact bytes, a late peer within the deadline, and no use after an abort."""
    transport = mine if name == "mine" else name
    session = f"contract of {name}"
    endpoint = Endpoint(transport, session, HOST, store.port, (0,), (0,), 1 << 20, 60.0)
    sent = [
        Payload(torch.arange(size, dtype=torch.int64).to(torch.uint8)) for size in (1, 70_000, 3)
    ]
    got = [Payload(torch.zeros(payload.nbytes, dtype=torch.uint8)) for payload in sent]
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(open_sender, endpoint, 0), pool.submit(open_receiver, endpoint, 0)
        sender = ends[0].result(120)
        receiver = ends[1].result(120)

        def send() -> None:
            for tag, payload in enumerate(sent):
                sender.send(0, tag, payload).wait()

        sending = pool.submit(send)
        for tag, into in enumerate(got):
            receiver.receive(0, tag, into).wait()
        sending.result(120)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(sent, got, strict=True))
    vars(endpoint)["timeout_s"] = 0.5
    # of tcp, whose deadlines are the kernel's
    for link in getattr(receiver, "_links", {}).values():
        link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tcp._timeval(0.5))
    with pytest.raises(WeightSyncError, match=r"deadline 0\.5 s"):
        receiver.receive(0, 9, got[0]).wait()
    for end in (sender, receiver):
        end.abort()
        end.abort()
    with pytest.raises(WeightSyncError, match="session"):
        sender.send(0, 0, sent[0]).wait()


@pytest.mark.slow
def test_what_it_declares_is_what_checks_and_sizes_follow(mine: str) -> None:
    assert part_bytes(mine, Platform("cpu")) == 2 * Platform("cpu").cache_bytes
    words = [f"rollout.sync.transport={mine}"]
    check_devices(load_config("tiny-moe-grpo", words), "cpu")
    with pytest.raises(
        ConfigError, match=r"keys requires trainer and engines on one machine, but cluster\.nodes=2"
    ):
        check_devices(load_config("tiny-moe-grpo", [*words, "cluster.nodes=2"]), "cpu")
    with pytest.raises(ConfigError, match=r"keys supports only CPU buffers"):
        check_devices(load_config("tiny-moe-grpo", words), "cuda")


def test_an_unknown_transport_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"shared_memori.*shared_memory"):
        load_config("tiny-moe-grpo", ["rollout.sync.transport=shared_memori"])
