"""The layout tracer on a toy module with the loader tricks of real engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import nn

from hybridflow.engines.layout_tracer import TracedLayout, TracedPiece, trace_layout
from hybridflow.errors import WeightSyncError
from hybridflow.models.layout import whole
from hybridflow.reshard.layout import Catalog, Layout, RankLayout
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.proof import prove

HIDDEN = 8
ROWS = 6
TENSORS = {
    "embed.weight": (10, HIDDEN),
    "q.weight": (ROWS, HIDDEN),
    "k.weight": (4, HIDDEN),
    "v.weight": (4, HIDDEN),
    "down.weight": (HIDDEN, 12),
    "a.weight": (3, HIDDEN),
    "b.weight": (5, HIDDEN),
    "norm.weight": (HIDDEN,),
    **{f"experts.{e}.{part}.weight": (4, HIDDEN) for e in range(3) for part in ("gate", "up")},
}


class Toy(nn.Module):
    """Rank 1 of 2: fused qkv, column-split down, padded vocabulary, stacked experts, two tensors
    joined by cat."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((8, HIDDEN), 5.0))
        self.qkv = nn.Parameter(torch.full((ROWS // 2 + 4, HIDDEN), 5.0))
        self.down = nn.Parameter(torch.full((HIDDEN, 6), 5.0))
        self.w13 = nn.Parameter(torch.full((3, 8, HIDDEN), 5.0))
        self.joined = nn.Parameter(torch.full((8, HIDDEN), 5.0))
        self.norm = nn.Parameter(torch.full((HIDDEN,), 5.0, dtype=torch.float64))
        self.register_buffer("rotary", torch.full((4,), 5.0))
        self.cached: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed.weight":
                self.embed.data[:2].copy_(tensor[8:10])
                self.embed.data[2:].zero_()
            elif name[0] in "qkv" and name[1] == ".":
                first, rows = {"q": (0, 3), "k": (3, 2), "v": (5, 2)}[name[0]]
                self.qkv.data.narrow(0, first, rows).copy_(tensor.narrow(0, rows, rows))
            elif name == "down.weight":
                self.down.data.copy_(tensor[:, 6:])
            elif name.startswith("experts"):
                expert = int(name.split(".")[1])
                half = 4 * ("up" in name)
                self.w13.data[expert][half : half + 4].copy_(tensor)
            elif name == "norm.weight":
                self.norm.data.copy_(tensor.to(torch.float64))
            else:
                self.cached[name] = tensor
        self.joined.data.copy_(torch.cat([self.cached["a.weight"], self.cached["b.weight"]], dim=0))


@pytest.fixture
def traced() -> TracedLayout:
    toy = Toy()
    layout = trace_layout(toy, toy.load_weights, TENSORS, torch.float32)
    # nothing was written: neither copies nor clearing
    assert all(bool((tensor == 5.0).all()) for tensor in [*toy.parameters(), *toy.buffers()])
    return layout


def test_every_copy_is_found(traced: TracedLayout) -> None:
    found = {(p.buffer, p.source): p for p in traced.pieces}
    assert found["qkv", "v.weight"] == TracedPiece(
        "v.weight", (2, 0), (2, HIDDEN), "qkv", (5, 0), (2, HIDDEN)
    )
    assert found["down", "down.weight"] == TracedPiece(
        "down.weight", (0, 6), (HIDDEN, 6), "down", (0, 0), (HIDDEN, 6)
    )
    assert found["w13", "experts.2.up.weight"] == TracedPiece(
        "experts.2.up.weight", (0, 0), (4, HIDDEN), "w13", (2, 4, 0), (1, 4, HIDDEN)
    )
    assert found["embed", None] == TracedPiece(None, (), (), "embed", (2, 0), (6, HIDDEN))
    assert found["joined", "a.weight"].local_start == (0, 0)
    assert found["joined", "b.weight"] == TracedPiece(
        "b.weight", (0, 0), (5, HIDDEN), "joined", (3, 0), (5, HIDDEN)
    )
    assert found["norm", "norm.weight"].shape == (HIDDEN,)
    assert traced.untouched == ("rotary",)
    assert traced.buffers["norm"] == ((HIDDEN,), "float64")


def test_pieces_give_what_the_loader_gives(traced: TracedLayout) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}
    toy = Toy()
    ours = Toy()
    toy.load_weights(iter(weights.items()))
    for piece in traced.pieces:
        place = tuple(
            slice(s, s + n) for s, n in zip(piece.local_start, piece.local_shape, strict=True)
        )
        view = ours.get_parameter(piece.buffer).data[place]
        if piece.source is None:
            view.fill_(piece.fill)
        else:
            region = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            view.copy_(weights[piece.source][region].reshape(view.shape))
    for name, tensor in toy.named_parameters():
        assert torch.equal(tensor, ours.get_parameter(name)), name


def test_the_trace_becomes_a_provable_side_of_a_plan(traced: TracedLayout) -> None:
    catalog = Catalog.of(TENSORS)
    whole_tensors = [whole(name, name, shape) for name, shape in TENSORS.items()]
    source = Layout(
        (RankLayout.of(whole_tensors, catalog.index(), "float32"),),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
    )
    rank = traced.rank_layout(catalog)
    rank = dataclasses.replace(rank, dtypes=("float32",) * len(rank.names))
    plan = make_plan(
        catalog, source, Layout((rank,), np.zeros(1, np.int64), np.zeros(1, np.int64)), 1 << 16
    )
    # the toy is one rank of two: what the other one would take is found missing, and nothing else
    with pytest.raises(
        WeightSyncError,
        match=(
            r"could not prove the slice plan: an engine uses only part of embed\.weight; .* part of "
            r"q\.weight; "
        ),
    ) as caught:
        prove(plan)
    assert "written" not in str(caught.value)
    assert (
        sum(int(n.prod()) for n, t in zip(rank.size, rank.tensor, strict=True) if t < 0)
        == 6 * HIDDEN
    )


def test_a_traced_module_can_be_on_meta() -> None:
    toy = Toy().to("meta")
    assert len(trace_layout(toy, toy.load_weights, TENSORS, torch.bfloat16).pieces) == 15


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda toy, weights: toy.down.data.copy_(torch.ones(HIDDEN, 6)),
            "fills down from a source that is not an HF tensor",
        ),
        (
            lambda toy, weights: toy.down.data.copy_(dict(weights)["down.weight"][:, ::2]),
            "a non-rectangular slice of down.weight for down",
        ),
        (
            lambda toy, weights: toy.embed.data.T.copy_(dict(weights)["embed.weight"][:8]),
            "to a non-rectangular slice of embed",
        ),
        (
            lambda toy, weights: toy.embed.data[::2].copy_(dict(weights)["k.weight"]),
            "to a non-rectangular slice of embed",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(load: object, message: str) -> None:
    toy = Toy()
    with pytest.raises(WeightSyncError, match=message):
        trace_layout(toy, lambda weights: load(toy, weights), TENSORS, torch.float32)  # type: ignore[operator]


def test_zeros_that_a_loader_pads_with_are_padding() -> None:
    """SGLang's `pad_or_narrow_weight` (layers/utils/common.py:20); zeros that were written to are
    something else."""
    toy = Toy()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensor = dict(weights)["b.weight"]
        toy.joined.data.copy_(
            torch.cat([tensor.narrow(0, 1, 4), torch.zeros(4, HIDDEN, device=tensor.device)], dim=0)
        )

    traced = trace_layout(toy, load, TENSORS, torch.float32)
    assert traced.pieces == (
        TracedPiece("b.weight", (1, 0), (4, HIDDEN), "joined", (0, 0), (4, HIDDEN)),
        TracedPiece(None, (), (), "joined", (4, 0), (4, HIDDEN)),
    )

    def overwritten(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        pad = torch.zeros(8, HIDDEN)
        pad.add_(1.0)
        toy.joined.data.copy_(pad)

    with pytest.raises(WeightSyncError, match="a source that is not an HF tensor"):
        trace_layout(toy, overwritten, TENSORS, torch.float32)


def test_buffers_that_are_filled_from_transposed_tensors_are_described_by_their_transpose() -> None:
    """SGLang stores gpt-oss's experts so; the loader clears padding before or after it copies, and
    a bias that another rank adds."""
    module = nn.Module()
    module.w2 = nn.Parameter(torch.full((2, 8, 6), 5.0))
    module.bias = nn.Parameter(torch.full((2, 8), 5.0))

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        module.w2.data[:, :, 4:].zero_()
        module.w2.data[:, :, :4].copy_(tensors["down"].transpose(-2, -1)[:, :, 4:8])
        module.bias.data.copy_(tensors["down_bias"].zero_())

    shapes = {"down": (2, 12, 8), "down_bias": (2, 8)}
    traced = trace_layout(module, load, shapes, torch.float32)
    assert traced.transposed == ("w2",)
    assert traced.buffers == {"w2": ((2, 6, 8), "float32"), "bias": ((2, 8), "float32")}
    assert traced.pieces == (
        TracedPiece(None, (), (), "w2", (0, 4, 0), (2, 2, 8)),
        TracedPiece("down", (0, 4, 0), (2, 4, 8), "w2", (0, 0, 0), (2, 4, 8)),
        TracedPiece(None, (), (), "bias", (0, 0), (2, 8)),
    )


def test_a_rank_whose_rows_are_all_padding_has_a_plan() -> None:
    """A vocabulary of 3 padded to 8 over two ranks, as SGLang cuts it: nothing of it is left for
    the second."""

    def rank(number: int) -> RankLayout:
        module = nn.Module()
        module.embed = nn.Parameter(torch.full((4, HIDDEN), 5.0), requires_grad=False)

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                first = min(4 * number, 3)
                mine = tensor.narrow(0, first, min(4, 3 - first))
                module.embed.data[: len(mine)].copy_(mine)
                module.embed.data[len(mine) :].fill_(0)

        return trace_layout(module, load, {"embed": (3, HIDDEN)}, torch.float32).rank_layout(
            Catalog.of({"embed": (3, HIDDEN)})
        )

    catalog = Catalog.of({"embed": (3, HIDDEN)})
    target = Layout((rank(0), rank(1)), np.arange(2), np.zeros(2, np.int64))
    held = RankLayout(
        ("embed",),
        ("float32",),
        np.array([[1, 3, HIDDEN]]),
        np.array([0]),
        np.zeros((1, 3), np.int64),
        np.array([[1, 3, HIDDEN]]),
        np.array([0]),
        np.zeros((1, 3), np.int64),
    )
    plan = make_plan(
        catalog, Layout((held,), np.zeros(1, np.int64), np.zeros(1, np.int64)), target, 1 << 20
    )
    proof = prove(plan)
    assert (proof.slices, proof.padding, proof.unused) == (1, 5 * HIDDEN, ())
