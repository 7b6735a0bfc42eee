"""Receiver and senders over a real store and real channels in one process; the engine is a module
with its loader."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from hybridflow.engines.sglang import weight_receiver
from hybridflow.models.layout import ParallelShape
from hybridflow.models.weights import RandomWeights
from hybridflow.process.rendezvous import master_store
from hybridflow.reshard.layout import megatron_layout, rank_tensors
from hybridflow.sync import session
from hybridflow.sync.schedule import EngineLayout, PlanFacts, make_weight_plan, post_catalog
from hybridflow.sync.sender import WeightSender
from hybridflow.sync.session import (
    ABORT,
    DESCRIBE,
    RECEIVE,
    Board,
    Control,
    Order,
    Outcome,
    RankReport,
)
from hybridflow.sync.transports.base import Endpoint
from tests.unit.reshard.reshard_cases import decoder_of

HOST = "127.0.0.1"
WAIT_S = 5.0
FAMILY = decoder_of("qwen3_moe")
SHAPE = ParallelShape(2, pipeline=2)
PAD = 5


class Engine(nn.Module):
    """Every tensor as it is, but for a vocabulary padded with rows that its loader clears, and output
    projections that are stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in FAMILY.tensors().items():
            rows = shape[0] + PAD * ("embed" in name)
            size = shape[::-1] if "o_proj" in name else (rows, *shape[1:])
            self.register_parameter(
                name.replace(".", "_"), nn.Parameter(torch.full(size, 7.0), requires_grad=False)
            )
        self.post_loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            mine = self.get_parameter(name.replace(".", "_"))
            if "o_proj" in name:
                mine.data.copy_(tensor.transpose(-2, -1))
                continue
            mine.data[: len(tensor)].copy_(tensor)
            if len(mine) > len(tensor):
                mine.data[len(tensor) :].zero_()

    def post_load_weights(self) -> None:
        self.post_loads += 1


class Bench:
    def __init__(self) -> None:
        self.store = master_store(HOST, 0, WAIT_S)
        self.engine = Engine()
        self.receiver = weight_receiver.receiver_of(self.engine)
        self.held: list[dict[str, torch.Tensor]] = []
        for at in SHAPE.coordinates():
            self.held.append(
                {local.name: torch.zeros(local.shape) for local in rank_tensors(FAMILY, at)}
            )
        self.senders = [WeightSender(rank, lambda rank=rank: self.held[rank]) for rank in range(2)]
        self.attempts = 0
        post_catalog(self.store, FAMILY.tensors(), "float32")
        self.facts = self.plan()

    def plan(self) -> PlanFacts:
        self.receiver.handle(Control(DESCRIBE, HOST, self.store.port, WAIT_S, "described", 0, 1))
        report = session.read_reports(self.store, "described", [0], WAIT_S)[0]
        assert report.error == ""
        engines = [EngineLayout("engine-0", (report.layout,))]
        facts = make_weight_plan(
            self.store,
            FAMILY,
            megatron_layout(FAMILY, SHAPE.coordinates(), "float32"),
            engines,
            1 << 18,
            WAIT_S,
        )
        for sender in self.senders:
            sender.adopt(facts.digest, HOST, self.store.port, WAIT_S)
        return facts

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        source = RandomWeights(FAMILY.tensors(), seed, 1.0)
        for at, held in zip(SHAPE.coordinates(), self.held, strict=True):
            for local in rank_tensors(FAMILY, at):
                for piece in local.pieces:
                    held[local.name][piece.slices()] = source.read(
                        piece.source, piece.source_start, piece.shape
                    )
        return {
            name: source.read(name, (0,) * len(shape), shape)
            for name, shape in FAMILY.tensors().items()
        }

    def sync(
        self, name: str = "s0", staged: bool = True, call_off: str = "", in_background: bool = False
    ) -> tuple[RankReport, list[Outcome], Board]:
        self.attempts += 1
        endpoint = Endpoint(
            "p2p", name, HOST, self.store.port, (0, 1), (0,), self.facts.message_bytes[0], WAIT_S
        )
        order = Order("engine-0", 0, endpoint, self.attempts, 3, self.facts.digest, staged)
        board = Board.open(order)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(sender.send, [order], WAIT_S) for sender in self.senders]
            if call_off:
                board.decide(ABORT)
            control = Control(
                RECEIVE, HOST, self.store.port, WAIT_S, board.report_prefix, 0, 1, order
            )
            if in_background:  # must return before anybody sends
                self.receiver.take(control, in_background)
            board.go()
            if not in_background:
                self.receiver.take(control, in_background)
            outcomes = [future.result()[0] for future in running]
        return board.reports(WAIT_S)[0], outcomes, board

    def holds(self, whole: dict[str, torch.Tensor]) -> bool:
        held = {name: self.engine.get_parameter(name.replace(".", "_")) for name in whole}
        return all(
            torch.equal(held[n].T if "o_proj" in n else held[n][: len(t)], t)
            for n, t in whole.items()
        )
