"""Engines that keep adapters next to their weights: the plan of both and of adapters alone, what
arrives where, and what the linears compute. Senders, receiver, store and channels are real; the
engine is a module with fused linears and its loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridflow.config.schema import LoraConfig
from hybridflow.engines.kept_adapters import keep
from hybridflow.engines.layout_tracer import trace_layout
from hybridflow.engines.weight_receiver import WeightReceiver
from hybridflow.errors import WeightSyncError
from hybridflow.models.layout import LocalTensor, ParallelShape
from hybridflow.models.lora import AdapterMap, is_a
from hybridflow.models.served_adapters import ServedAdapters
from hybridflow.process.rendezvous import master_store
from hybridflow.reshard.layout import megatron_layout, rank_tensors
from hybridflow.sync import session
from hybridflow.sync.schedule import (
    EngineLayout,
    PlanFacts,
    make_weight_plan,
    post_catalog,
    sync_catalog,
)
from hybridflow.sync.sender import WeightSender
from hybridflow.sync.session import DESCRIBE, Control
from tests.unit.engines.bench import HOST, WAIT_S, Bench
from tests.unit.reshard.reshard_cases import decoder_of

FAMILY = decoder_of("qwen3")
SHAPE = ParallelShape(2, tensor=2)
RANK = 3
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
LAST = FAMILY.num_layers - 1


class Product:
    """What SGLang calls a quant method."""

    def apply(self, linear: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, linear.weight, bias)


class Linear(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 7.0), requires_grad=False)
        self.quant_method = Product()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


class Holder(nn.Module):
    """A tensor that is not a linear's."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 7.0), requires_grad=False)


class Engine(nn.Module):
    """The tensors of the family; queries, keys and values are one linear, as are gate and up."""

    def __init__(self) -> None:
        super().__init__()
        shapes = FAMILY.tensors()
        self.places = {}
        fused: dict[str, int] = {}
        for name, shape in shapes.items():
            found = placed(name)
            start = fused.get(found, 0)
            self.places[name] = (found, start)
            fused[found] = start + shape[0]
        for name, shape in shapes.items():
            path = self.places[name][0].removesuffix(".weight").split(".")
            parent: nn.Module = self
            for part in path[:-1]:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            if not hasattr(parent, path[-1]):
                kind = Linear if "_proj" in path[-1] else Holder
                parent.add_module(path[-1], kind(fused[self.places[name][0]], *shape[1:]))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            mine, start = self.places[name]
            self.get_parameter(mine).data[start : start + len(tensor)].copy_(tensor)


def placed(name: str) -> str:
    """The parameter of the engine that contains a tensor."""
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, fused)
    return name


class AdapterBench(Bench):
    """Two tensor-parallel trainer ranks with adapters and one engine rank."""

    def __init__(self) -> None:
        self.store = master_store(HOST, 0, WAIT_S)
        self.engine: Any = Engine()
        self.receiver = WeightReceiver(self.engine, lambda: 0)
        config = LoraConfig(rank=RANK, alpha=6.0, sync="adapter")
        self.map = AdapterMap(FAMILY, config, 7)
        self.served = self.map.served()
        self.sent = [
            [*tensors, *self.factors(tensors)]
            for tensors in (rank_tensors(FAMILY, at) for at in SHAPE.coordinates())
        ]
        self.held = [
            {local.name: torch.zeros(local.shape) for local in tensors} for tensors in self.sent
        ]
        self.senders = [WeightSender(rank, lambda rank=rank: self.held[rank]) for rank in range(2)]
        self.attempts = 0
        post_catalog(self.store, FAMILY.tensors(), "float32", adapters=self.served)
        self.facts = self.plan()

    def factors(self, tensors: list[LocalTensor]) -> list[LocalTensor]:
        return [local for one in self.map.local(tensors) for local in (one.a, one.b)]

    def plan(self) -> PlanFacts:
        self.receiver.handle(Control(DESCRIBE, HOST, self.store.port, WAIT_S, "described", 0, 1))
        report = session.read_reports(self.store, "described", [0], WAIT_S)[0]
        assert report.error == ""
        facts = make_weight_plan(
            self.store,
            FAMILY,
            megatron_layout(
                FAMILY,
                SHAPE.coordinates(),
                "float32",
                sync_catalog(FAMILY, adapters=self.served),
                self.factors,
            ),
            [EngineLayout("engine-0", (report.layout,))],
            1 << 18,
            WAIT_S,
            adapters=self.served,
        )
        for sender in self.senders:
            sender.adopt(facts.digests[0], HOST, self.store.port, WAIT_S, *facts.digests[1:])
        return facts

    def trained(self, seed: int) -> dict[str, torch.Tensor]:
        """New values of all tensors on the ranks; returns them whole."""
        shapes = {**FAMILY.tensors(), **self.served.shapes}
        whole = {}
        for number, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(1000 * seed + number)
            whole[name] = torch.randn(shape, generator=generator)
        for tensors, held in zip(self.sent, self.held, strict=True):
            for local in tensors:
                for piece in local.pieces:
                    region = tuple(
                        slice(s, s + n)
                        for s, n in zip(piece.source_start, piece.shape, strict=True)
                    )
                    held[local.name][piece.slices()] = whole[piece.source][region]
        return whole

    def outputs(self) -> dict[str, torch.Tensor]:
        """What the last layer's linears make of a fixed input, by module."""
        found = {}
        for name, module in self.engine.named_modules():
            if isinstance(module, Linear) and f".{LAST}." in name:
                x = torch.randn(
                    5, module.weight.shape[1], generator=torch.Generator().manual_seed(1)
                )
                found[name] = module(x)
        return found

    def expected(
        self, base: dict[str, torch.Tensor], factors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The same from whole tensors, merged."""
        merged: dict[str, list[torch.Tensor]] = {}
        for name in FAMILY.tensors():
            if name in self.served.factors and f".{LAST}." in name:
                a, b = (factors[factor] for factor in self.served.factors[name])
                module = placed(name).removesuffix(".weight")
                merged.setdefault(module, []).append(base[name] + 6.0 / RANK * b @ a)
        return {
            name: F.linear(
                torch.randn(5, parts[0].shape[1], generator=torch.Generator().manual_seed(1)),
                torch.cat(parts),
            )
            for name, parts in merged.items()
        }


@pytest.fixture(scope="module")
def bench() -> Iterator[AdapterBench]:
    built = AdapterBench()
    yield built
    for sender in built.senders:
        sender.close()


def nbytes(shapes: Iterable[tuple[int, ...]]) -> int:
    return 4 * sum(map(prod, shapes))


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-3) for name in found)


def test_weights_arrive_with_adapters_and_then_adapters_alone(bench: AdapterBench) -> None:
    everything = bench.facts
    alone = bench.facts.adapters
    assert alone is not None
    assert alone.nbytes[0] == nbytes(bench.served.shapes.values())
    assert everything.nbytes[0] == alone.nbytes[0] + nbytes(FAMILY.tensors().values())
    first = bench.trained(1)
    report, outcomes, _ = bench.sync("all")
    assert report.error == "" and {outcome.status for outcome in outcomes} == {"served"}
    assert report.nbytes == everything.nbytes[0]
    assert close(bench.outputs(), bench.expected(first, first))
    try:
        bench.facts = alone
        for seed, staged in ((2, True), (3, False)):
            later = bench.trained(seed)
            report, outcomes, _ = bench.sync("alone", staged)
            assert report.error == "" and report.nbytes == alone.nbytes[0]
            # the ranks hold other weights now as well, but only adapters were sent
            assert close(bench.outputs(), bench.expected(first, later))
            assert not close(bench.outputs(), bench.expected(first, first))
    finally:
        bench.facts = everything


def test_all_linears_keep_adapters_and_begin_without_effect() -> None:
    fresh = AdapterBench()
    linears = [module for module in fresh.engine.modules() if isinstance(module, Linear)]
    assert len(linears) == 4 * FAMILY.num_layers
    assert all(linear.adapter_a.shape == (RANK, linear.weight.shape[1]) for linear in linears)
    x = torch.randn(2, linears[0].weight.shape[1])
    assert torch.equal(linears[0](x), F.linear(x, linears[0].weight))
    # described again: the same buffers, and one adapter
    before = [linear.adapter_b.data_ptr() for linear in linears]
    fresh.receiver._layout = None
    fresh.plan()
    assert [linear.adapter_b.data_ptr() for linear in linears] == before
    assert isinstance(linears[0].quant_method, Product)


def traced_of(engine: Any) -> Any:
    return trace_layout(engine, engine.load_weights, FAMILY.tensors(), torch.float32)


def test_linears_that_the_trainer_adapts_separately_are_refused() -> None:
    engine = Engine()
    served = AdapterMap(FAMILY, LoraConfig(rank=RANK), 7).served()
    name = "model.layers.0.self_attn.k_proj.weight"
    for factors in (
        {one: pair for one, pair in served.factors.items() if one != name},
        {**served.factors, name: ("other.lora_A.weight", served.factors[name][1])},
    ):
        with pytest.raises(WeightSyncError, match=r"qkv_proj\.weight in the engine fuses linears"):
            keep(engine, traced_of(engine), ServedAdapters(1.0, factors, served.shapes))


def test_a_module_that_cannot_add_an_adapter_is_refused() -> None:
    engine: Any = Engine()
    del engine.model.layers.get_submodule("1").self_attn.o_proj.quant_method
    served = AdapterMap(FAMILY, LoraConfig(rank=RANK), 7).served()
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.o_proj\.weight in Linear"):
        keep(engine, traced_of(engine), served)


def test_a_description_survives_json() -> None:
    served = AdapterMap(FAMILY, LoraConfig(rank=RANK, alpha=6.0), 7).served()
    assert ServedAdapters.from_dict(served.to_dict()) == served
    assert served.rank == RANK and served.scale == 2.0
    assert {pair[0] for pair in served.factors.values()} == set(filter(is_a, served.shapes))
