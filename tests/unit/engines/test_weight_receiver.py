"""Receiver and senders over a real store and real channels, in one process; the engine is a small module with a loader
of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from hybridflow.engines.sglang import weight_receiver
from hybridflow.engines.sglang.weight_control import DESCRIBE, RECEIVE, Control
from hybridflow.models.weights import RandomWeights
from hybridflow.process.rendezvous import master_store
from hybridflow.reshard.layout import ParallelShape, megatron_layout, rank_tensors
from hybridflow.sync import session
from hybridflow.sync.schedule import EngineLayout, PlanFacts, make_weight_plan, post_catalog
from hybridflow.sync.sender import WeightSender
from hybridflow.sync.session import ABORT, Board, Order, Outcome, RankReport
from hybridflow.sync.transports.base import Endpoint
from tests.unit.reshard.reshard_cases import decoder_of

HOST, WAIT_S = "127.0.0.1", 5.0
FAMILY = decoder_of("qwen3_moe")
SHAPE = ParallelShape(2, pipeline=2)
PAD = 5


class Engine(nn.Module):
    """Every tensor as it is, but for a vocabulary padded with rows that its loader clears."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in FAMILY.tensors().items():
            rows = shape[0] + PAD * ("embed" in name)
            self.register_parameter(
                name.replace(".", "_"), nn.Parameter(torch.full((rows, *shape[1:]), 7.0), requires_grad=False)
            )
        self.post_loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            mine = self.get_parameter(name.replace(".", "_"))
            mine.data[: len(tensor)].copy_(tensor)
            if len(mine) > len(tensor):
                mine.data[len(tensor) :].zero_()

    def post_load_weights(self) -> None:
        self.post_loads += 1


class Bench:
    def __init__(self) -> None:
        self.store = master_store(HOST, 0, WAIT_S)
        self.engine = Engine()
        self.receiver = weight_receiver.WeightReceiver(self.engine)
        self.held: list[dict[str, torch.Tensor]] = []
        for at in SHAPE.coordinates():
            self.held.append({local.name: torch.zeros(local.shape) for local in rank_tensors(FAMILY, at)})
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
            self.store, FAMILY, megatron_layout(FAMILY, SHAPE.coordinates(), "float32"), engines, 1 << 18, WAIT_S
        )
        for sender in self.senders:
            sender.adopt(facts.digest, HOST, self.store.port, WAIT_S)
        return facts

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        source = RandomWeights(FAMILY.tensors(), seed, 1.0)
        for at, held in zip(SHAPE.coordinates(), self.held, strict=True):
            for local in rank_tensors(FAMILY, at):
                for piece in local.pieces:
                    held[local.name][piece.slices()] = source.read(piece.source, piece.source_start, piece.shape)
        return {name: source.read(name, (0,) * len(shape), shape) for name, shape in FAMILY.tensors().items()}

    def sync(
        self, name: str = "s0", staged: bool = True, call_off: str = "", in_background: bool = False
    ) -> tuple[RankReport, list[Outcome], Board]:
        self.attempts += 1
        endpoint = Endpoint("p2p", name, HOST, self.store.port, (0, 1), (0,), self.facts.message_bytes[0], WAIT_S)
        order = Order("engine-0", 0, endpoint, self.attempts, 3, self.facts.digest, staged)
        board = Board.open(order)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(sender.send, [order], WAIT_S) for sender in self.senders]
            if call_off:
                board.decide(ABORT)
            control = Control(RECEIVE, HOST, self.store.port, WAIT_S, board.report_prefix, 0, 1, order)
            if in_background:  # must return before anybody sends
                self.receiver.take(control, in_background)
            board.go()
            if not in_background:
                self.receiver.take(control, in_background)
            outcomes = [future.result()[0] for future in running]
        return board.reports(WAIT_S)[0], outcomes, board

    def holds(self, whole: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.engine.get_parameter(n.replace(".", "_"))[: len(t)], t) for n, t in whole.items())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(weight_receiver, "_rank_in_engine", lambda: 0)  # SGLang is not running here
    built = Bench()
    yield built
    for sender in built.senders:
        sender.close()


@pytest.mark.parametrize("staged", [True, False])
def test_new_weights_arrive_again_and_again_and_padding_is_cleared(bench: Bench, staged: bool) -> None:
    padded = bench.engine.get_parameter("model_embed_tokens_weight")
    for seed in (1, 2):
        whole = bench.train(seed)
        report, outcomes, _ = bench.sync(staged=staged)
        assert report.error == "" and report.nbytes == sum(t.nbytes for t in whole.values()) == sum(
            o.nbytes for o in outcomes
        )
        assert {o.fate for o in outcomes} == {"served"}
        assert bench.holds(whole) and bool((padded[-PAD:] == 0).all())
    assert bench.engine.post_loads == 2


def test_a_stage_of_a_pipeline_receives_behind_the_back_of_its_scheduler(bench: Bench) -> None:
    """The loader returns while nobody has sent anything yet; inference tensors, which may be written in inference mode
    alone, included."""
    with torch.inference_mode():
        for parameter in bench.engine.parameters():
            parameter.data = parameter.data.clone()
        for seed in (1, 2):
            whole = bench.train(seed)
            report, outcomes, _ = bench.sync(in_background=True)
            assert report.error == "" and {o.fate for o in outcomes} == {"served"} and bench.holds(whole)


def test_describing_leaves_the_live_weights_alone(bench: Bench) -> None:
    assert all(bool((parameter == 7.0).all()) for parameter in bench.engine.parameters())
    assert bench.facts.padding == PAD * FAMILY.tensors()["model.embed_tokens.weight"][1]


def test_weights_that_moved_are_found_again(bench: Bench) -> None:
    bench.train(1)
    bench.sync()
    for parameter in bench.engine.parameters():
        parameter.data = parameter.data.clone()
    whole = bench.train(2)
    assert bench.sync()[0].error == "" and bench.holds(whole)


def test_another_layout_than_the_plans_is_refused_and_a_later_session_works(bench: Bench) -> None:
    whole = bench.train(1)
    bench.sync()
    small = bench.engine.get_parameter("model_embed_tokens_weight").data
    bench.engine.model_embed_tokens_weight.data = torch.full((len(small) + 3, small.shape[1]), 9.0)
    bench.train(2)
    report, outcomes, board = bench.sync()
    assert "rank 0: the weights no longer lie as they did" in report.error and board.decision() == ABORT
    assert all("engine-0" in o.error and "trainer rank" in o.error for o in outcomes)
    bench.engine.model_embed_tokens_weight.data = small
    assert bench.holds(whole)
    whole = bench.train(3)
    assert bench.sync("s1")[0].error == "" and bench.holds(whole)


def test_what_was_called_off_is_not_copied(bench: Bench) -> None:
    whole = bench.train(1)
    bench.sync()
    bench.train(2)
    report, _, _ = bench.sync("s1", call_off="the driver has given up")
    assert report.error != "" and bench.holds(whole)


def test_nothing_that_goes_wrong_leaves_the_loader(bench: Bench) -> None:
    weight_receiver.load(bench.engine, [("no json", torch.zeros(1))])
    weight_receiver.load(bench.engine, [])
    gone = Control(DESCRIBE, HOST, 1, 0.2, "described", 0, 1)
    weight_receiver.load(bench.engine, [(gone.to_json(), torch.zeros(1))])


def test_a_loader_that_cannot_be_traced_is_reported(bench: Bench) -> None:
    class Odd(Engine):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.get_parameter(name.replace(".", "_")).data.copy_(tensor.sum())

    receiver = weight_receiver.WeightReceiver(Odd())
    receiver.handle(Control(DESCRIBE, HOST, bench.store.port, WAIT_S, "odd", 0, 1))
    report = session.read_reports(bench.store, "odd", [0], WAIT_S)[0]
    assert report.error.startswith("rank 0: ") and "no HF tensor" in report.error
