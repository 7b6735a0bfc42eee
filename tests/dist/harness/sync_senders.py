"""A trainer rank of the weight-sync tests: holds the slices of a Megatron layout and sends them
with the product's `WeightSender`.

`python -m tests.dist.harness.sync_senders RANK HOST PORT MODEL SHAPE KIND` obeys commands
`command/N` in the store and answers `answer/N/RANK`. Faults are made here, around the channel; the
product knows nothing of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hybridflow.config.schema import OptimConfig
from hybridflow.device.platform import Platform
from hybridflow.models import family_of
from hybridflow.models.layout import ParallelShape
from hybridflow.models.weights import RandomWeights
from hybridflow.process.rendezvous import client_store
from hybridflow.reshard.layout import rank_tensors
from hybridflow.sync.sender import WeightSender
from hybridflow.sync.session import Order
from hybridflow.sync.transports import open_sender
from hybridflow.sync.transports.base import Endpoint, Payload, Work
from tests.dist.harness.policies import batch_of, policy_of, share_of

STD = 0.2


def tensors_of(model: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Whole HF tensors; norms differ from one, so that a dropped one shows."""
    family = family_of(model, mtp=True)
    source = RandomWeights(family.tensors(), seed, STD)
    whole = {}
    for name, shape in family.tensors().items():
        whole[name] = source.read(name, (0,) * len(shape), shape)
        if len(shape) == 1:
            whole[name] = whole[name] + 0.1 * torch.randn(
                shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, name)))
            )
    return whole


class FaultyChannel:
    """A sender's channel that does something at its message number `at`: corrupt it, sleep, or stop
    there until the store says go on."""

    def __init__(self, inner: Any, fault: dict[str, Any], store: Any, rank: int) -> None:
        self.inner = inner
        self.fault = fault
        self.store = store
        self.rank = rank
        self.count = 0

    def send(self, peer: int, tag: int, payload: Payload) -> Work:
        if self.count == self.fault["at"]:
            if self.fault["do"] == "corrupt":
                payload = Payload(payload.tensor.clone())  # it may be the parameter itself
                payload.tensor[3] ^= 64
            elif self.fault["do"] == "sleep":
                time.sleep(self.fault["seconds"])
            elif self.fault["do"] == "hold":
                for key in (f"held/{self.rank}", f"held/{self.rank}/{self.fault['engine']}"):
                    self.store.set(key, "1")
                self.store.get(self.fault["until"])
        self.count += 1
        return self.inner.send(peer, tag, payload)

    def close(self) -> None:
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()


class Rank:
    def __init__(
        self, rank: int, host: str, port: int, model: dict[str, Any], shape: dict[str, int]
    ) -> None:
        self.rank = rank
        self.model = model
        self.host = host
        self.port = port
        self.locals = rank_tensors(
            family_of(model, mtp=True), ParallelShape(**shape).coordinates()[rank]
        )
        device = Platform.detect().device()
        self.held = {local.name: torch.zeros(local.shape, device=device) for local in self.locals}
        self.sender = WeightSender(rank, lambda: self.held, self.open)
        self.faults: dict[str, dict[str, Any]] = {}  # by the engine's name

    def open(self, endpoint: Endpoint, rank: int, device: Any) -> Any:
        channel = open_sender(endpoint, rank, device)
        fault = self.faults.pop(endpoint.session.split(".")[1], None)
        if fault is None:
            return channel
        return FaultyChannel(channel, fault, client_store(self.host, self.port, 120), rank)

    def adopt(self, plans: list[str]) -> None:
        self.sender.adopt(plans[0], self.host, self.port, 20.0, *plans[1:])

    def weights(self, seed: int) -> None:
        whole = tensors_of(self.model, seed)
        for local in self.locals:
            for piece in local.pieces:
                region = tuple(
                    slice(s, s + n) for s, n in zip(piece.source_start, piece.shape, strict=True)
                )
                self.held[local.name][piece.slices()] = whole[piece.source][region]

    def fault(self, ranks: list[int], engine: str, **fault: Any) -> None:
        """Make the channels of the engine's next sessions do this."""
        if self.rank in ranks:
            self.sender.close()
            self.faults[engine] = {**fault, "engine": engine}

    def send(self, orders: list[dict[str, Any]], go_timeout_s: float) -> list[dict[str, Any]]:
        return [
            asdict(outcome)
            for outcome in self.sender.send(
                [Order.from_dict(order) for order in orders], go_timeout_s
            )
        ]


class MegatronRank(Rank):
    """A rank of a real Megatron world, which trains. `shape` has the parallel sizes, and `lora`
    where adapters are trained."""

    def __init__(
        self, rank: int, host: str, port: int, model: dict[str, Any], shape: dict[str, Any]
    ) -> None:

        self.rank = rank
        self.model = model
        self.host = host
        self.port = port
        self.faults = {}
        parallel = {name: size for name, size in shape.items() if name not in ("ranks", "lora")}
        # with larger weights float32 rounding alone moves log-probs by 1e-5 where queries and keys
        # have no norm, in transformers as in the engine
        self.policy = policy_of(parallel, model, std=0.15, lora=shape.get("lora"))
        self.policy.set_optimizer(OptimConfig(lr=1e-2))
        self.sender = WeightSender(rank, self.policy.sent_tensors, self.open)

    def coordinates(self) -> list[list[int]]:
        from hybridflow.mcore.parallel import all_coordinates

        return [at.row() for at in all_coordinates()]

    def send(self, orders: list[dict[str, Any]], go_timeout_s: float) -> list[dict[str, Any]]:
        """As `PolicyWorker.send_weights` does it."""
        try:
            return super().send(orders, go_timeout_s)
        finally:
            self.policy.release_copies()

    def step(self, seed: int) -> float:
        """One optimizer update; returns the gradient's norm."""
        from hybridflow.workers.losses import sft_loss

        batch = share_of(batch_of(8, seed))
        _, info = self.policy.train_mini_batch(
            batch, sft_loss, columns=(), max_tokens=40, temperature=1.0, with_entropy=False
        )
        return float(info["grad_norm"])

    def export(self, folder: str) -> None:
        from hybridflow.mcore.hf_export import export

        export(self.policy, Path(folder), self.model, None)


def main() -> None:
    torch.set_num_threads(1)
    rank, host, port, model, shape, kind = sys.argv[1:]
    make = {"held": Rank, "megatron": MegatronRank}[kind]
    me: Rank | None = make(int(rank), host, int(port), json.loads(model), json.loads(shape))
    store = client_store(host, int(port), 3600)
    number = json.loads(store.get("commands"))
    while True:
        command = json.loads(store.get(f"command/{number}"))
        name = command.pop("name")
        if name == "quit":
            return
        if name == "cut":  # another layout in place of this one; it may have no such rank
            if me is not None:
                me.sender.close()
            new = command["shape"]
            me = (
                make(int(rank), host, int(port), json.loads(model), new)
                if int(rank) < new["ranks"]
                else None
            )
            answer = None
        else:
            answer = None if me is None else getattr(me, name)(**command)
        store.set(f"answer/{number}/{rank}", json.dumps(answer))
        number += 1


if __name__ == "__main__":
    main()
