"""Many strided slices into one message and back, with the message's checksum, in one read of what is moved.

A slice is a rectangle `[a, b, c]` of a buffer and the bytes of the message that it fills, row after row. On the way in
it is copied, cast from float32 to bfloat16, or made block-wise fp8 (`fp8_cast`); on the way back it is copied. The
checksum is `digest`'s, of the whole message.

A program moves a tile and takes the checksum of the words (eight bytes) of the message that lie in it whole. Words that
two slices or two rows share are read again afterwards, by one more launch: of a model, whose dimensions are multiples
of eight, that is the last word of a message and what stands behind an odd number of scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from hybridflow_kernels import INTERPRETED, TRITON, fp8_cast, uses_triton
from hybridflow_kernels.digest import WORD, digest, signed

ROWS, WORDS = (2, 8) if INTERPRETED else (8, 64)  # of a program's tile; with four warps
AGAIN = 32 if INTERPRETED else 1024  # words that a program reads again
_VECTOR = 16  # bytes that a thread of a GPU moves at a time, where all begins at multiples of them


@dataclass(frozen=True)
class Slice:
    """A rectangle of a buffer and its place in a message.

    Attributes:
        tensor: `[a, b, c]`, any strides; where fp8 is made, the whole blocks that are read.
        begin: the first byte in the message, a multiple of the element's size there.
        size: of the rectangle in the message.
        dtype: of the message.
        block: rows and columns of an fp8 block. None: nothing is made.
        row, column: where the rectangle begins in the values that are made.
    """

    tensor: torch.Tensor
    begin: int
    size: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, int] | None = None
    row: int = 0
    column: int = 0

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.begin + prod(self.size) * self.dtype.itemsize

    @property
    def makes_scales(self) -> bool:
        """Whether the blocks' scales are made, and not their values."""
        return self.block is not None and self.dtype == torch.float32

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """Its place in a message."""
        return payload[self.begin : self.end].view(self.dtype).view(self.size)


class Slices:
    """The slices of one message, prepared for any number of passes while the buffers stay where they are.

    Args:
        slices: they fill the message without gaps, in order.
        nbytes: of the message.

    Raises:
        ValueError: gaps or overlaps, a place that does not suit the element's size, a rectangle of another size than
            its slice of the buffer, or several devices.
    """

    def __init__(self, slices: Sequence[Slice], nbytes: int) -> None:
        _check(slices, nbytes)
        self._slices, self._nbytes = tuple(slices), nbytes
        self._in_kernel = bool(slices) and uses_triton(slices[0].tensor)
        if self._in_kernel:
            self._prepare()

    def pack(self, payload: torch.Tensor, seed: int) -> torch.Tensor:
        """Fill `payload` (uint8 `[nbytes]`); returns its checksum, int64 `[1]` on its device. Nothing is waited for.

        Raises:
            ValueError: a payload of another size, dtype or device.
        """
        return self._pass(payload, seed, scatter=False)

    def scatter(self, payload: torch.Tensor, seed: int) -> torch.Tensor:
        """Copy `payload` into the buffers; returns the checksum of what was read.

        Raises:
            ValueError: as for `pack`, or a slice that is cast or made on the way in.
        """
        if any(piece.block is not None or piece.dtype != piece.tensor.dtype for piece in self._slices):
            raise ValueError("slices that are cast, or made of blocks, have no way back")
        return self._pass(payload, seed, scatter=True)

    def _pass(self, payload: torch.Tensor, seed: int, scatter: bool) -> torch.Tensor:
        self._check_payload(payload)
        with torch.cuda.device_of(payload):  # a thread that sends begins with the first GPU
            return self._on_its_device(payload, seed, scatter)

    def _on_its_device(self, payload: torch.Tensor, seed: int, scatter: bool) -> torch.Tensor:
        if not self._in_kernel or payload.data_ptr() % _VECTOR:
            _move(self._slices, payload, scatter)
            return digest(payload, seed)
        _move(self._by_torch, payload, scatter)
        sums = torch.empty(self._programs, dtype=torch.int64, device=payload.device)
        done = 0
        for group in self._groups:
            group.launch(payload, sums[done:], seed, scatter)
            done += group.programs
        for values, scales in self._made:
            place = None if scales is None else scales.view(payload)
            words = fp8_cast.Words(sums[done:], values.begin, seed) if _has_words(values) else None
            done += fp8_cast.launch(values.tensor, _block(values), place, values.view(payload), _at(values), words)
        _again_kernel[(self._programs - done,)](
            self._again,
            len(self._again),
            payload,
            sums[done:],
            self._nbytes,
            signed(seed),
            WORDS=AGAIN,
            num_warps=4,
        )
        return sums.sum(0, keepdim=True)

    def _check_payload(self, payload: torch.Tensor) -> None:
        if payload.dtype != torch.uint8 or payload.shape != (self._nbytes,) or not payload.is_contiguous():
            raise ValueError(
                f"the payload is {payload.dtype} {tuple(payload.shape)}, strides {payload.stride()}; the slices fill "
                f"{self._nbytes} bytes in a row"
            )
        if self._slices and payload.device != self._slices[0].tensor.device:
            raise ValueError(f"the payload is on {payload.device}, the slices on {self._slices[0].tensor.device}")

    def _prepare(self) -> None:
        """Sort the slices by the kernel that moves them, and find the words that are left over."""
        device = self._slices[0].tensor.device
        groups: dict[tuple[int, bool, bool], list[Slice]] = {}
        values = [piece for piece in self._slices if piece.block and not piece.makes_scales and _fits(piece)]
        scales = {_blocks_of(piece): piece for piece in self._slices if piece.makes_scales}
        # the scales of all the blocks that a slice's values are made of come from the same read
        self._made = [(piece, scales.get(_blocks_of(piece)) if _is_all(piece) else None) for piece in values]
        done = {id(piece) for pair in self._made for piece in pair}
        for piece in self._slices:
            if piece.block is None and _moves(piece):
                done.add(id(piece))
                groups.setdefault(_kind(piece), []).append(piece)
        self._groups = [_Group(pieces, *kind) for kind, pieces in groups.items()]
        self._by_torch = [piece for piece in self._slices if id(piece) not in done]
        whole = [piece for pieces in groups.values() for piece in pieces] + values
        owned = [(piece.begin, piece.end // WORD * WORD) for piece in whole if _has_words(piece)]
        rows, programs = [], 0
        for low, high in _gaps(owned, self._nbytes):
            rows.append((low // WORD, high // WORD, programs))
            programs += -(-(high - low) // WORD // AGAIN)
        self._again = torch.tensor(rows, dtype=torch.int64, device=device)
        self._programs = programs + sum(group.programs for group in self._groups)
        self._programs += sum(
            fp8_cast.programs(piece.tensor, _block(piece), piece.size, _at(piece))
            for piece in values
            if _has_words(piece)
        )


class _Group:
    """Slices that one launch moves: elements of so many bytes in the message, cast or not, all of them and their rows
    at multiples of `_VECTOR` or not."""

    def __init__(self, pieces: Sequence[Slice], width: int, cast: bool, wide: bool) -> None:
        self._constants = {"WIDTH": width, "CAST": cast, "WIDE": wide, "ROWS": ROWS, "WORDS": WORDS}
        self.programs, rows = 0, []
        for piece in pieces:
            outer, inner, last, middle, columns = _rows_of(piece)
            across = -(-columns * width // (WORD * WORDS))
            numel = prod(piece.size)
            rows.append(
                [
                    *(piece.tensor.data_ptr(), outer, inner, last, middle, columns, numel, piece.begin, across),
                    *(self.programs, int(_has_words(piece))),
                ]
            )
            down = -(-numel // (columns * ROWS))
            self.programs += down * across
        self._table = torch.tensor(rows, dtype=torch.int64, device=pieces[0].tensor.device)

    def launch(self, payload: torch.Tensor, sums: torch.Tensor, seed: int, scatter: bool) -> None:
        """Move them; each program leaves what its words add to the checksum in `sums`."""
        _move_kernel[(self.programs,)](
            self._table, len(self._table), payload, sums, signed(seed), **self._constants, SCATTER=scatter, num_warps=4
        )


def _check(slices: Sequence[Slice], nbytes: int) -> None:
    at = 0
    for piece in slices:
        if piece.begin != at or at % piece.dtype.itemsize:
            raise ValueError(
                f"a slice of {piece.dtype} begins at byte {piece.begin}, where {at} bytes are filled; slices fill a "
                "message without gaps, each from a multiple of its element's size on"
            )
        if piece.tensor.dim() != 3 or (piece.block is None and tuple(piece.size) != tuple(piece.tensor.shape)):
            raise ValueError(f"a slice of {tuple(piece.size)} is to be filled from {tuple(piece.tensor.shape)}")
        if piece.tensor.device != slices[0].tensor.device:
            raise ValueError(f"slices are on {piece.tensor.device} and {slices[0].tensor.device}")
        at = piece.end
    if at != nbytes:
        raise ValueError(f"slices of {at} bytes are to fill a message of {nbytes}")


def _move(slices: Sequence[Slice], payload: torch.Tensor, scatter: bool) -> None:
    """The torch form, without the checksum."""
    copied = [piece for piece in slices if piece.block is None]
    if copied:
        views, local = [piece.view(payload) for piece in copied], [piece.tensor for piece in copied]
        torch._foreach_copy_(*((local, views) if scatter else (views, local)))
    for piece in slices:
        if piece.makes_scales:
            fp8_cast.write_scales(piece.tensor, _block(piece), piece.view(payload))
        elif piece.block is not None:
            fp8_cast.write_weights(piece.tensor, _block(piece), *_at(piece), piece.view(payload))


def _block(piece: Slice) -> tuple[int, int]:
    assert piece.block is not None
    return piece.block


def _at(piece: Slice) -> tuple[int, int]:
    return piece.row, piece.column


def _fits(piece: Slice) -> bool:
    """Whether a program holds a block of it."""
    return fp8_cast.in_kernel(piece.tensor, _block(piece))


def _blocks_of(piece: Slice) -> tuple[object, ...]:
    return piece.tensor.data_ptr(), piece.tensor.shape, piece.tensor.stride(), piece.block


def _is_all(piece: Slice) -> bool:
    return tuple(piece.size) == tuple(piece.tensor.shape)


def _moves(piece: Slice) -> bool:
    """Whether the kernel moves it: elements of up to four bytes as they are, or cast to bfloat16."""
    same = piece.tensor.dtype == piece.dtype and piece.dtype.itemsize <= 4
    return same or (piece.tensor.dtype, piece.dtype) == (torch.float32, torch.bfloat16)


def _rows_of(piece: Slice) -> tuple[int, int, int, int, int]:
    """A slice as rows: strides of its first axis, of its second and within a row, length of the second axis, and
    elements of a row. What is contiguous is cut into rows of a tile's width, the last of which may be shorter."""
    tensor = piece.tensor
    if tensor.is_contiguous():
        columns = WORDS * WORD // piece.dtype.itemsize
        return 0, columns, 1, -(-tensor.numel() // columns), columns
    outer, inner, last = tensor.stride()
    return outer, inner, last, tensor.shape[1], tensor.shape[2]


def _kind(piece: Slice) -> tuple[int, bool, bool]:
    outer, inner, last, _, columns = _rows_of(piece)
    width, local = piece.dtype.itemsize, piece.tensor.dtype.itemsize
    bounds = (piece.tensor.data_ptr(), outer * local, inner * local, piece.begin, columns * width)
    return width, piece.tensor.dtype != piece.dtype, last == 1 and not any(bound % _VECTOR for bound in bounds)


def _has_words(piece: Slice) -> bool:
    """Whether words of the message lie in single rows of it; its end may cut one."""
    if piece.begin % WORD:
        return False
    if piece.block is None:
        return _rows_of(piece)[-1] * piece.dtype.itemsize % WORD == 0
    return not (piece.size[2] % WORD or piece.column % WORD or piece.block[1] % WORD)


def _gaps(owned: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Stretches between what is owned, of whole words, to the end of the word behind the message's last byte."""
    found, at = [], 0
    for low, high in [*sorted(owned), (nbytes // WORD * WORD + WORD,) * 2]:
        if low > at:
            found.append((at // WORD * WORD, low))
        at = max(at, high)
    return found


if TRITON:
    import triton
    import triton.language as tl

    from hybridflow_kernels.digest import kernel_word

    _FIELDS = tl.constexpr(11)  # of a slice in a table
    _FIRST = tl.constexpr(9)  # the field with its first program

    @triton.jit
    def _last_not_after(table, count, program, FIELDS: tl.constexpr, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
        """The last row of a table whose first program is not behind this one."""
        low, high = count * 0, count
        while high - low > 1:
            middle = (low + high) // 2
            is_before = tl.load(table + middle * FIELDS + FIRST) <= program
            low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
        return low

    @triton.jit
    def _bfloat16(x):  # type: ignore[no-untyped-def]
        """Bits of the nearest bfloat16, ties to even."""
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)  # noqa: PLR0124  not a number

    @triton.jit(do_not_specialize=["count", "seed"])
    def _move_kernel(  # type: ignore[no-untyped-def]
        table,
        count,
        payload,
        sums,
        seed,
        WIDTH: tl.constexpr,
        CAST: tl.constexpr,
        WIDE: tl.constexpr,
        ROWS: tl.constexpr,
        WORDS: tl.constexpr,
        SCATTER: tl.constexpr,
    ):
        """One tile of one slice."""
        EACH: tl.constexpr = 8 // WIDTH  # elements of a word
        INT: tl.constexpr = tl.int8 if WIDTH == 1 else (tl.int16 if WIDTH == 2 else tl.int32)
        LOCAL: tl.constexpr = tl.float32 if CAST else INT
        program = tl.program_id(0)
        place = table + _last_not_after(table, count, program, _FIELDS, _FIRST) * _FIELDS
        address, outer, inner, last = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
        middle, length, numel = tl.load(place + 4), tl.load(place + 5), tl.load(place + 6)
        begin, across = tl.load(place + 7), tl.load(place + 8)
        number = program - tl.load(place + _FIRST)
        has_words = tl.load(place + 10) != 0
        if WIDE:
            address, begin = tl.multiple_of(address, 16), tl.multiple_of(begin, 16)
            outer, inner, length = tl.multiple_of(outer, 4), tl.multiple_of(inner, 4), tl.multiple_of(length, 4)
            last = 1
        row = number // across * ROWS + tl.arange(0, ROWS)
        word = number % across * WORDS + tl.arange(0, WORDS)
        column = word[None, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
        index = row[:, None, None] * length + column
        real = (column < length) & (index < numel)
        at = (row // middle * outer + row % middle * inner)[:, None, None] + column * last
        local = address.to(tl.pointer_type(LOCAL)) + at
        message = (payload + begin).to(tl.pointer_type(INT)) + index
        if SCATTER:
            bits = tl.load(message, mask=real, other=0)
            tl.store(local, bits, mask=real)
        elif CAST:
            bits = _bfloat16(tl.load(local, mask=real, other=0.0))
            tl.store(message, bits, mask=real)
        else:
            bits = tl.load(local, mask=real, other=0)
            tl.store(message, bits, mask=real)
        part = (bits.to(tl.int64) & ((1 << (8 * WIDTH)) - 1)) << (8 * WIDTH * tl.arange(0, EACH))[None, None, :]
        words = tl.sum(part, axis=2)
        end = (word[None, :] + 1) * EACH
        whole = has_words & (end <= length) & (row[:, None] * length + end <= numel)
        position = (begin + row[:, None] * length * WIDTH) // 8 + word[None, :]
        tl.store(sums + program, tl.sum(tl.where(whole, kernel_word(words, position, seed), 0)))

    @triton.jit(do_not_specialize=["count", "nbytes", "seed"])
    def _again_kernel(table, count, payload, sums, nbytes, seed, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
        """The checksum of words that no tile has; the last one of a message is filled with zeros."""
        program = tl.program_id(0)
        place = table + _last_not_after(table, count, program, 3, 2) * 3
        number = program - tl.load(place + 2)
        position = tl.load(place) + number * WORDS + tl.arange(0, WORDS)
        wanted = position < tl.load(place + 1)
        whole = wanted & ((position + 1) * 8 <= nbytes)
        word = tl.load(payload.to(tl.pointer_type(tl.int64)) + position, mask=whole, other=0)
        for byte in tl.static_range(8):
            place_of = position * 8 + byte
            some = tl.load(payload + place_of, mask=wanted & (whole == 0) & (place_of < nbytes), other=0)
            word |= some.to(tl.int64) << (8 * byte)
        tl.store(sums + program, tl.sum(tl.where(wanted, kernel_word(word, position, seed), 0)))
