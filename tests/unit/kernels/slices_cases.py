"""Run by test_kernels.py, in Triton's interpreter and with the torch forms: messages of many
slices, bit for bit.

What a message must hold is written slice by slice, by torch's own conversions and the torch form of
fp8; its checksum is `digest`'s, which digest_cases.py holds against Python's integers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.reshard.fp8_blocks import SCALES, WEIGHTS, Blocks
from hybridflow.sync.messages import Item, Message
from hybridflow.sync.staging import Copies
from hybridflow.sync.transports.base import Payload
from hybridflow_kernels import INTERPRETED, fp8_cast
from hybridflow_kernels.digest import digest
from hybridflow_kernels.slices import ROWS, SPAN, WORDS, Slice, Slices

FP8 = torch.float8_e4m3fn
SIZES = st.tuples(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 2 * ROWS + 1]),
    st.sampled_from([1, 4, 7, 8, 40, 72]),
)
KINDS = st.sampled_from(
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.uint8, torch.uint8),
        (torch.float32, torch.float16),  # torch's, as no kernel casts so
    ]
)
LAYOUTS = st.sampled_from(["contiguous", "rows apart", "columns apart", "transposed", "inside"])


def numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator)
    found = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -3, 4, shape, generator=generator
    )
    return found.to(dtype)


def rectangle(
    size: tuple[int, int, int], dtype: torch.dtype, layout: str, generator: torch.Generator
) -> torch.Tensor:
    """A view of a buffer with other strides, of this size."""
    a, b, c = size
    if layout == "contiguous":
        return numbers(size, dtype, generator)
    if layout == "rows apart":
        return numbers((a, b, c + 3), dtype, generator)[:, :, 2 : c + 2]
    if layout == "columns apart":
        return numbers((a, b, 2 * c), dtype, generator)[:, :, ::2]
    if layout == "transposed":
        return numbers((a, c, b), dtype, generator).transpose(1, 2)
    return numbers((a + 1, b + 2, c + 16), dtype, generator)[1:, 1 : b + 1, 16:]


def in_order(pieces: list[dict[str, Any]]) -> tuple[list[Slice], int]:
    """Wider elements first, one after another."""
    at = 0
    found = []
    for piece in sorted(pieces, key=lambda piece: -piece["dtype"].itemsize):
        found.append(Slice(begin=at, **piece))
        at = found[-1].end
    return found, at


def expected_payload(pieces: list[Slice], nbytes: int) -> torch.Tensor:
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    for piece in pieces:
        place = payload[piece.begin : piece.end].view(piece.dtype).view(piece.size)
        if piece.block is None:
            place.copy_(piece.tensor)
            continue
        scales = fp8_cast.block_scales(piece.tensor, piece.block)
        if piece.dtype == torch.float32:
            place.copy_(scales)
            continue
        wide = scales.repeat_interleave(piece.block[0], 1).repeat_interleave(piece.block[1], 2)
        _, r, c = piece.tensor.shape
        made = (piece.tensor.float() / wide[:, :r, :c]).to(FP8)
        rows = slice(piece.row, piece.row + piece.size[1])
        columns = slice(piece.column, piece.column + piece.size[2])
        place.view(torch.uint8).copy_(made.view(torch.uint8)[:, rows, columns])
    return payload


def packs_right(pieces: list[Slice], nbytes: int, seed: int) -> None:
    expected = expected_payload(pieces, nbytes)
    payload = torch.full((nbytes,), 77, dtype=torch.uint8)
    prepared = Slices(pieces, nbytes)
    for _ in range(2):  # prepared once, used again
        found = prepared.pack(payload, seed)
        assert torch.equal(payload, expected)
        assert torch.equal(found, digest(expected, seed))
        payload.fill_(78)


@settings(max_examples=5 if INTERPRETED else 15)
@given(data=st.data(), seed=st.integers(0, 2**64 - 1))
def test_a_message_holds_its_slices_and_has_their_checksum(data: st.DataObject, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    pieces = []
    for size, (local, wire), layout in data.draw(
        st.lists(st.tuples(SIZES, KINDS, LAYOUTS), min_size=0, max_size=5)
    ):
        pieces.append(
            {"tensor": rectangle(size, local, layout, generator), "size": size, "dtype": wire}
        )
    packs_right(*in_order(pieces), seed)


@settings(max_examples=5 if INTERPRETED else 15)
@given(
    blocks=st.sampled_from(
        [((8, 16), (2, 19, 48)), ((1, 16), (1, 5, 40)), ((4, 4), (2, 9, 12)), ((3, 5), (1, 7, 11))]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    part=st.sampled_from(["all", "values", "scales", "aligned part", "odd part"]),
    odd=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fp8_of_blocks_is_made_in_the_same_pass(
    blocks: tuple[tuple[int, int], tuple[int, int, int]],
    dtype: torch.dtype,
    part: str,
    odd: bool,
    seed: int,
) -> None:
    """Values with the scales of the same blocks, alone, and parts of them; with an odd number of
    words in front."""
    block, (n, r, c) = blocks
    generator = torch.Generator().manual_seed(seed)
    weights = rectangle((n, r, c), dtype, "rows apart" if seed % 2 else "contiguous", generator)
    scales = {
        "tensor": weights,
        "size": (n, -(-r // block[0]), -(-c // block[1])),
        "dtype": torch.float32,
    }
    values = {"tensor": weights, "size": (n, r, c), "dtype": FP8, "block": block}
    if part.endswith("part"):
        row = 1
        column = 8 if part == "aligned part" and c > 16 else 3
        values |= {"row": row, "column": column, "size": (n, r - row, (c - column) // 8 * 8)}
    pieces = [
        {
            "tensor": torch.randn(1, 1, 3, generator=generator),
            "size": (1, 1, 3),
            "dtype": torch.float32,
        }
    ] * odd
    pieces += [scales | {"block": block}] * (part in ("all", "scales")) + [values] * (
        part != "scales"
    )
    packs_right(*in_order(pieces), seed)


@pytest.mark.parametrize(
    ("local", "wire"), [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.uint8,) * 2]
)
@pytest.mark.parametrize("layout", ["contiguous", "inside", "rows apart"])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        *((1, 1), (ROWS, WORDS), (ROWS + 1, WORDS + 2)),
        pytest.param(2 * ROWS, SPAN, marks=pytest.mark.full),
        (ROWS - 1, SPAN + 2),
    ],
)
def test_the_edges_of_a_programs_rows_and_words(
    local: torch.dtype, wire: torch.dtype, layout: str, rows: int, words: int
) -> None:
    """Two matrices, so that a program's rows are in both, are packed and, where nothing is cast,
    scattered."""
    if not INTERPRETED:
        rows = min(rows, 5)
        words = min(words, 12)
    size = (2, rows, words * 8 // wire.itemsize)
    view = rectangle(size, local, layout, torch.Generator().manual_seed(words))
    pieces, nbytes = in_order([{"tensor": view, "size": size, "dtype": wire}])
    packs_right(pieces, nbytes, 2**64 - words)
    if local == wire:
        expected = view.clone()
        payload = expected_payload(pieces, nbytes)
        view.zero_()
        assert torch.equal(Slices(pieces, nbytes).scatter(payload, 3), digest(payload, 3))
        assert torch.equal(view, expected)


@settings(max_examples=5 if INTERPRETED else 15)
@given(data=st.data(), seed=st.integers(0, 2**64 - 1))
def test_the_way_back_fills_the_slices_alone(data: st.DataObject, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 1000)
    kinds = st.sampled_from([torch.bfloat16, torch.float32, torch.uint8])
    pieces = []
    buffers = []
    for size, dtype, layout in data.draw(
        st.lists(st.tuples(SIZES, kinds, LAYOUTS), min_size=1, max_size=4)
    ):
        view = rectangle(size, dtype, layout, generator)
        buffers.append((view, view.untyped_storage().nbytes()))
        pieces.append({"tensor": view, "size": size, "dtype": dtype})
    laid, nbytes = in_order(pieces)
    payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    wanted = []
    for piece in laid:
        storage = torch.tensor([], dtype=torch.uint8).set_(piece.tensor.untyped_storage())
        wanted.append((storage, storage.clone()))
        whole = wanted[-1][1].view(piece.dtype)
        place = whole.as_strided(
            piece.tensor.shape, piece.tensor.stride(), piece.tensor.storage_offset()
        )
        place.copy_(payload[piece.begin : piece.end].view(piece.dtype).view(piece.size))
    found = Slices(laid, nbytes).scatter(payload, seed)
    assert torch.equal(found, digest(payload, seed))
    for storage, expected in wanted:
        assert torch.equal(storage, expected)


def test_one_wrong_bit_changes_the_checksum_that_the_receiver_takes() -> None:
    view = torch.zeros(1, 2 * ROWS + 1, 40, dtype=torch.bfloat16)
    prepared = Slices([Slice(view, 0, tuple(view.shape), torch.bfloat16)], 2 * view.numel())
    payload = torch.zeros(2 * view.numel(), dtype=torch.uint8)
    right = prepared.scatter(payload, 5)
    for byte in range(0, len(payload), 61):
        payload[byte] ^= 16
        assert not torch.equal(prepared.scatter(payload, 5), right)
        payload[byte] ^= 16


def test_every_rounding_to_bfloat16() -> None:
    """Middles between two numbers, their neighbours, the largest, subnormal numbers and what is not
    finite."""
    high = torch.arange(0, 1 << 16, 151, dtype=torch.int32) << 16
    bits = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        torch.float32
    )
    bits = torch.cat([bits, torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan])])[
        None, None
    ]
    payload = torch.empty(2 * bits.numel(), dtype=torch.uint8)
    Slices([Slice(bits, 0, tuple(bits.shape), torch.bfloat16)], len(payload)).pack(payload, 0)
    found = payload.view(torch.bfloat16)
    expected = bits[0, 0].bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(found[known].view(torch.int16), expected[known].view(torch.int16))


@pytest.mark.skipif(not INTERPRETED, reason="the torch form reads all again")
def test_no_word_is_read_again_but_the_last_where_dimensions_are_multiples_of_eight() -> None:
    """A shard of attention heads, experts' rows, a norm, and blocks with an even number of
    scales."""
    generator = torch.Generator().manual_seed(0)
    weights = numbers((1, 16, 32), torch.bfloat16, generator)
    pieces: list[dict[str, Any]] = [
        {"tensor": weights, "size": (1, 2, 2), "dtype": torch.float32, "block": (8, 16)},
        {"tensor": weights, "size": (1, 16, 32), "dtype": FP8, "block": (8, 16)},
        {"tensor": numbers((2, 6, 64), torch.float32, generator)[:, :, 16:48], "size": (2, 6, 32)},
        {"tensor": numbers((1, 1, 40), torch.bfloat16, generator), "size": (1, 1, 40)},
    ]
    laid, nbytes = in_order([{"dtype": torch.bfloat16} | piece for piece in pieces])
    prepared = Slices(laid, nbytes)
    # the four scales, two words, come from the blocks' programs; nobody's words are theirs and the
    # last
    again = [(low, high) for low, high, _ in prepared._again.tolist()]
    assert again == [(0, 2), (nbytes // 8, nbytes // 8 + 1)]
    assert not prepared._by_torch


@pytest.mark.parametrize(
    ("change", "nbytes", "message"),
    [
        ({"begin": 2}, 34, "begins at byte 2 after 0 filled bytes"),
        ({}, 40, "the slices have 32 bytes, but the message has 40"),
        ({"size": (1, 4, 5)}, 40, r"a slice of shape \(1, 4, 5\) does not match .* \(1, 4, 4\)"),
        ({"tensor": torch.zeros(4, 4, dtype=torch.bfloat16)}, 32, r"its tensor of shape \(4, 4\)"),
    ],
)
def test_slices_that_do_not_fill_a_message_are_refused(
    change: dict[str, Any], nbytes: int, message: str
) -> None:
    words = {
        "tensor": torch.zeros(1, 4, 4, dtype=torch.bfloat16),
        "begin": 0,
        "size": (1, 4, 4),
    } | change
    with pytest.raises(ValueError, match=message):
        Slices([Slice(dtype=torch.bfloat16, **words)], nbytes)


def test_several_devices_are_refused() -> None:
    here, there = (
        torch.zeros(1, 1, 8, dtype=torch.uint8, device=device) for device in ("cpu", "meta")
    )
    with pytest.raises(ValueError, match="slices must be on one device, got meta and cpu"):
        Slices(
            [Slice(here, 0, (1, 1, 8), torch.uint8), Slice(there, 8, (1, 1, 8), torch.uint8)], 16
        )


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (torch.zeros(31, dtype=torch.uint8), "expected 32 contiguous bytes"),
        (torch.zeros(8), "the payload is torch.float32"),
        (torch.zeros(64, dtype=torch.uint8)[::2], "strides"),
        (
            torch.zeros(32, dtype=torch.uint8, device="meta"),
            "the payload is on meta, but the slices are on cpu",
        ),
    ],
)
def test_a_payload_of_another_kind_is_refused(payload: torch.Tensor, message: str) -> None:
    prepared = Slices(
        [Slice(torch.zeros(1, 4, 4, dtype=torch.bfloat16), 0, (1, 4, 4), torch.bfloat16)], 32
    )
    for call in (prepared.pack, prepared.scatter):
        with pytest.raises(ValueError, match=message):
            call(payload, 0)


def test_what_is_cast_or_made_has_no_way_back() -> None:
    cast = Slices([Slice(torch.zeros(1, 1, 4), 0, (1, 1, 4), torch.bfloat16)], 8)
    with pytest.raises(ValueError, match="cannot be scattered"):
        cast.scatter(torch.zeros(8, dtype=torch.uint8), 0)


def test_a_weight_syncs_copies_are_the_kernels_where_buffers_are_not_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends, against what a CPU's sender puts into the same message: casts, scales and values,
    two buffers."""
    generator = torch.Generator().manual_seed(0)
    buffers = {
        "q": torch.randn(16, 40, generator=generator),
        "up": torch.randn(3, 24, 64, generator=generator),
    }
    blocks = {"start": (1, 0, 16), "size": (2, 24, 48), "block": (8, 16)}
    items = (
        Item("up", (0, 0, 0), (2, 3, 3), "float32", Blocks(SCALES, **blocks)),  # type: ignore[arg-type]
        Item("q", (0, 2, 8), (1, 9, 32), "bfloat16"),
        Item("up", (0, 8, 0), (2, 16, 48), "float8_e4m3fn", Blocks(WEIGHTS, **blocks)),  # type: ignore[arg-type]
    )
    nbytes = 18 * 4 + 9 * 32 * 2 + 2 * 16 * 48
    message = Message(0, 0, 0, nbytes, items)
    expected = Payload(torch.zeros(nbytes, dtype=torch.uint8))
    Copies([message], buffers).pack(0, expected, 11)

    sender = Copies([message], buffers)
    payload = Payload(torch.zeros(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(sender, "device", torch.device("cuda"))
    sent = sender.pack(0, payload, 11)
    assert torch.equal(payload.tensor, expected.tensor)
    assert isinstance(sent, torch.Tensor) and torch.equal(sent, digest(expected.tensor, 11))

    engine = {
        "s": torch.zeros(2, 3, 3),
        "qkv": torch.zeros(32, 32, dtype=torch.bfloat16),
        "w": torch.zeros(2, 16, 48, dtype=torch.float8_e4m3fn),
    }
    places = (
        ("s", (0, 0, 0), "float32"),
        ("qkv", (0, 7, 0), "bfloat16"),
        ("w", (0, 0, 0), "float8_e4m3fn"),
    )
    arrived = tuple(
        Item(name, start, item.size, dtype)
        for (name, start, dtype), item in zip(places, items, strict=True)
    )
    receiver = Copies([Message(0, 0, 0, nbytes, arrived)], engine)
    monkeypatch.setattr(receiver, "device", torch.device("cuda"))
    found = receiver.unpack(0, payload, 11)
    assert isinstance(found, torch.Tensor) and torch.equal(found, sent)
    assert (
        torch.equal(engine["qkv"][7:16], buffers["q"][2:11, 8:].bfloat16())
        and not engine["qkv"][16:].any()
    )
    assert torch.equal(engine["s"].view(torch.uint8).view(-1), payload.tensor[:72])
    assert torch.equal(engine["w"].view(torch.uint8).view(-1), payload.tensor[-2 * 16 * 48 :])
