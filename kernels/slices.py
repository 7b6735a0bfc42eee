"""Packs many strided slices into one message, or unpacks them, and computes the message's checksum,
reading all data once.

A slice is a rectangle `[a, b, c]` of a buffer and the bytes of the message that it fills, in
row-major order. While packing, a slice is copied, cast from float32 to bfloat16, or quantised to
block-wise fp8 (`fp8_cast`). While scattering, it is copied. The checksum equals `digest` of the
whole message.

A program moves a tile and computes the checksum of the eight-byte words of the message that are
entirely in the tile. Words shared by two slices or two rows are reread by one additional launch. In
a model whose dimensions are multiples of eight, these are only the last word of a message and the
words after an odd number of scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from hybridflow_kernels import INTERPRETED, LARGEST, TRITON, fp8_cast, uses_triton
from hybridflow_kernels.digest import ODD, WORD, digest, signed

# A program of four warps moves SPAN words of some rows, WORDS of each per loop iteration. If
# everything is 16-byte aligned it processes ROWS rows, otherwise fewer depending on the element
# size, to avoid register spills.
ROWS, WORDS, SPAN = (4, 8, 16) if INTERPRETED else (16, 64, 256)
FEWER_ROWS = {4: 2, 2: 2, 1: 1} if INTERPRETED else {4: 4, 2: 4, 1: 2}
AGAIN = 32 if INTERPRETED else 1024  # words per program of the second read
_VECTOR = 16  # bytes per access of a GPU thread, if everything is aligned to them


@dataclass(frozen=True)
class Slice:
    """A rectangle of a buffer and its position in a message.

    Attributes:
        tensor: `[a, b, c]`, any strides; for fp8, the whole blocks that are read.
        begin: first byte in the message, a multiple of the message's element size.
        size: shape of the rectangle in the message.
        dtype: dtype in the message.
        block: rows and columns of an fp8 block. None: no quantisation.
        row, column: start of the rectangle within the quantised values.
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
        """First byte after the slice."""
        return self.begin + prod(self.size) * self.dtype.itemsize

    @property
    def makes_scales(self) -> bool:
        """True if the slice contains the blocks' scales rather than their values."""
        return self.block is not None and self.dtype == torch.float32

    def view(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of `payload` that the slice fills."""
        return payload[self.begin : self.end].view(self.dtype).view(self.size)


class Slices:
    """The slices of one message, prepared for any number of passes, as long as the buffers do not
    move.

    Args:
        slices: in order, filling the message without gaps.
        nbytes: size of the message.

    Raises:
        ValueError: gaps or overlaps, an offset that is not aligned to the element size, a rectangle
            whose size differs from its slice of the buffer, or several devices.
    """

    def __init__(self, slices: Sequence[Slice], nbytes: int) -> None:
        _check(slices, nbytes)
        self._slices = tuple(slices)
        self._nbytes = nbytes
        self._in_kernel = bool(slices) and uses_triton(slices[0].tensor)
        if self._in_kernel:
            self._prepare()

    def pack(self, payload: torch.Tensor, seed: int) -> torch.Tensor:
        """Fill `payload` (uint8 `[nbytes]`) and return its checksum, int64 `[1]` on its device,
        without synchronising.

        Raises:
            ValueError: the payload has the wrong size, dtype or device.
        """
        return self._pass(payload, seed, scatter=False)

    def scatter(self, payload: torch.Tensor, seed: int) -> torch.Tensor:
        """Copy `payload` into the buffers and return the checksum of the data read.

        Raises:
            ValueError: same as for `pack`; also if a slice is cast or quantised while packing.
        """
        if any(
            piece.block is not None or piece.dtype != piece.tensor.dtype for piece in self._slices
        ):
            raise ValueError("slices that are cast or quantised cannot be scattered")
        return self._pass(payload, seed, scatter=True)

    def _pass(self, payload: torch.Tensor, seed: int, scatter: bool) -> torch.Tensor:
        self._check_payload(payload)
        # a sender thread starts with the first GPU as its current device
        with torch.cuda.device_of(payload):
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
            done += fp8_cast.launch(
                values.tensor, _block(values), place, values.view(payload), _at(values), words
            )
        _again_kernel[(self._programs - done,)](
            self._again,
            self._again_of,
            payload,
            sums[done:],
            self._nbytes,
            signed(seed),
            WORDS=AGAIN,
            num_warps=4,
        )
        return sums.sum(0, keepdim=True)

    def _check_payload(self, payload: torch.Tensor) -> None:
        if (
            payload.dtype != torch.uint8
            or payload.shape != (self._nbytes,)
            or not payload.is_contiguous()
        ):
            raise ValueError(
                f"the payload is {payload.dtype} {tuple(payload.shape)}, strides "
                f"{payload.stride()}; expected {self._nbytes} contiguous bytes"
            )
        if self._slices and payload.device != self._slices[0].tensor.device:
            raise ValueError(
                f"the payload is on {payload.device}, but the slices are on "
                f"{self._slices[0].tensor.device}"
            )

    def _prepare(self) -> None:
        """Group the slices by the kernel that moves them, and find the words that no kernel
        checksums.
        """
        device = self._slices[0].tensor.device
        groups: dict[tuple[int, bool, bool], list[Slice]] = {}
        values = [
            piece
            for piece in self._slices
            if piece.block and not piece.makes_scales and _fits(piece)
        ]
        scales = {_blocks_of(piece): piece for piece in self._slices if piece.makes_scales}
        # if a slice contains the values of all blocks, the scales of these blocks come from the
        # same read
        self._made = [
            (piece, scales.get(_blocks_of(piece)) if _is_all(piece) else None) for piece in values
        ]
        done = {id(piece) for pair in self._made for piece in pair}
        for piece in self._slices:
            if piece.block is None and _moves(piece):
                done.add(id(piece))
                groups.setdefault(_kind(piece), []).append(piece)
        self._groups = [_Group(pieces, *kind) for kind, pieces in groups.items()]
        self._by_torch = [piece for piece in self._slices if id(piece) not in done]
        whole = [piece for pieces in groups.values() for piece in pieces] + values
        owned = [(piece.begin, piece.end // WORD * WORD) for piece in whole if _has_words(piece)]
        rows: list[list[int]] = []
        counts: list[int] = []
        programs = 0
        for low, high in _gaps(owned, self._nbytes):
            rows.append([low // WORD, high // WORD, programs])
            counts.append(-(-(high - low) // WORD // AGAIN))
            programs += counts[-1]
        self._again, self._again_of = _table(rows, counts, device)
        self._programs = programs + sum(group.programs for group in self._groups)
        self._programs += sum(
            fp8_cast.programs(piece.tensor, _block(piece), piece.size, _at(piece))
            for piece in values
            if _has_words(piece)
        )


class _Group:
    """Slices that one launch moves.

    Args:
        pieces: slices, all of one kind.
        width: bytes per element in the message; `WORD` if they are copied by word.
        cast: True if they are cast.
        wide: True if they and their rows are aligned to `_VECTOR`.
    """

    def __init__(self, pieces: Sequence[Slice], width: int, cast: bool, wide: bool) -> None:
        self._by_word = width == WORD
        rows_each = ROWS if wide else FEWER_ROWS[width]
        self._constants = {"ROWS": rows_each, "WORDS": WORDS, "SPAN": SPAN}
        if not self._by_word:
            self._constants |= {"WIDTH": width, "CAST": cast, "WIDE": wide}
        self.programs = 0
        rows = []
        counts = []
        for piece in pieces:
            outer, inner, last, middle, columns = _rows_of(piece)
            numel = prod(piece.size)
            own = piece.dtype.itemsize
            across = -(-columns * own // (WORD * SPAN))
            unit, align = (_VECTOR // own if self._by_word else 4, _VECTOR) if wide else (1, 1)
            place = [
                outer // unit,
                inner // unit,
                last,
                middle,
                columns // unit,
                numel // unit,
                piece.begin // align,
            ]
            rows.append(
                [piece.tensor.data_ptr(), *place, across, self.programs, int(_has_words(piece))]
            )
            counts.append(-(-numel // (columns * rows_each)) * across)
            self.programs += counts[-1]
        self._table, self._of = _table(rows, counts, pieces[0].tensor.device)

    def launch(self, payload: torch.Tensor, sums: torch.Tensor, seed: int, scatter: bool) -> None:
        """Launch the kernel that moves the slices. Each program writes the checksum contribution of
        its words to `sums`."""
        kernel = _words_kernel if self._by_word else _elements_kernel
        kernel[(self.programs,)](
            self._table,
            self._of,
            payload,
            sums,
            signed(seed),
            **self._constants,
            SCATTER=scatter,
            num_warps=4,
        )


def _table(
    rows: list[list[int]], counts: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table's rows and the table row of each program, both on the device. `counts` is
    the number of programs per row."""
    of = torch.repeat_interleave(torch.tensor(counts)).int()
    return torch.tensor(rows, dtype=torch.int64, device=device), of.to(device)


def _check(slices: Sequence[Slice], nbytes: int) -> None:
    at = 0
    for piece in slices:
        if piece.begin != at or at % piece.dtype.itemsize:
            raise ValueError(
                f"a slice of {piece.dtype} begins at byte {piece.begin} after {at} filled bytes; "
                "slices must fill the message without gaps, each aligned to its element size"
            )
        if piece.tensor.dim() != 3 or (
            piece.block is None and tuple(piece.size) != tuple(piece.tensor.shape)
        ):
            raise ValueError(
                f"a slice of shape {tuple(piece.size)} does not match its tensor of shape "
                f"{tuple(piece.tensor.shape)}"
            )
        if piece.tensor.device != slices[0].tensor.device:
            raise ValueError(
                f"slices must be on one device, got {piece.tensor.device} and "
                f"{slices[0].tensor.device}"
            )
        at = piece.end
    if at != nbytes:
        raise ValueError(f"the slices have {at} bytes, but the message has {nbytes}")


def _move(slices: Sequence[Slice], payload: torch.Tensor, scatter: bool) -> None:
    """Move the slices with torch operations. The checksum is computed separately."""
    copied = [piece for piece in slices if piece.block is None]
    if copied:
        views = [piece.view(payload) for piece in copied]
        local = [piece.tensor for piece in copied]
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
    """Return True if one program can hold a block of the slice."""
    return fp8_cast.in_kernel(piece.tensor, _block(piece))


def _blocks_of(piece: Slice) -> tuple[object, ...]:
    return piece.tensor.data_ptr(), piece.tensor.shape, piece.tensor.stride(), piece.block


def _is_all(piece: Slice) -> bool:
    return tuple(piece.size) == tuple(piece.tensor.shape)


def _moves(piece: Slice) -> bool:
    """Return True if the kernel can move the slice: elements of up to four bytes without a cast, or
    a cast to bfloat16.

    The kernel counts rows in int32.
    """
    if piece.tensor.shape[0] * piece.tensor.shape[1] > LARGEST:
        return False
    same = piece.tensor.dtype == piece.dtype and piece.dtype.itemsize <= 4
    return same or (piece.tensor.dtype, piece.dtype) == (torch.float32, torch.bfloat16)


def _rows_of(piece: Slice) -> tuple[int, int, int, int, int]:
    """Describe a slice as rows: strides of its first and second axis and within a row, length of
    the second axis, row length.

    A contiguous slice is divided into rows of a tile's width, the last of which may be shorter.
    """
    tensor = piece.tensor
    if tensor.is_contiguous():
        columns = SPAN * WORD // piece.dtype.itemsize
        return 0, columns, 1, -(-tensor.numel() // columns), columns
    outer, inner, last = tensor.stride()
    return outer, inner, last, tensor.shape[1], tensor.shape[2]


def _kind(piece: Slice) -> tuple[int, bool, bool]:
    """Return the arguments `width`, `cast` and `wide` of the `_Group` that moves the slice."""
    outer, inner, last, _, columns = _rows_of(piece)
    width = piece.dtype.itemsize
    local = piece.tensor.dtype.itemsize
    cast = piece.tensor.dtype != piece.dtype
    sizes = (columns * width, prod(piece.size) * width)
    bounds = (piece.tensor.data_ptr(), outer * local, inner * local, piece.begin, *sizes)
    wide = last == 1 and not any(bound % _VECTOR for bound in bounds)
    return WORD if wide and not cast else width, cast, wide


def _has_words(piece: Slice) -> bool:
    """Return True if each of the message's words is within a single row of the slice. The slice's
    end may cut through a word."""
    if piece.begin % WORD:
        return False
    if piece.block is None:
        return _rows_of(piece)[-1] * piece.dtype.itemsize % WORD == 0
    return not (piece.size[2] % WORD or piece.column % WORD or piece.block[1] % WORD)


def _gaps(owned: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges that `owned` does not cover. Each range starts at a word boundary. The
    last range includes the message's padded last word."""
    found = []
    at = 0
    for low, high in [*sorted(owned), (nbytes // WORD * WORD + WORD,) * 2]:
        if low > at:
            found.append((at // WORD * WORD, low))
        at = max(at, high)
    return found


if TRITON:
    import triton
    import triton.language as tl

    from hybridflow_kernels.digest import kernel_key, kernel_mixed, kernel_tail, kernel_word

    _FIELDS = tl.constexpr(11)  # fields per slice in a table
    # difference between the keys of consecutive iterations
    _KEYS = tl.constexpr(signed(WORDS * ODD % (1 << 64)))

    @triton.jit
    def _rows_here(table, of, SPAN: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the table address of this program's slice, the slice's rows that the program
        moves, and the first word within these rows."""
        program = tl.program_id(0)
        place = table + tl.load(of + program).to(tl.int64) * _FIELDS
        across = tl.load(place + 8).to(tl.int32)
        number = program - tl.load(place + 9).to(tl.int32)
        return place, number // across * ROWS + tl.arange(0, ROWS), number % across * SPAN

    @triton.jit
    def _at_rows(place, row, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the start of each row in the buffer and in the slice's part of the message, and
        the number of elements in each row.

        The last row of a contiguous slice has fewer elements. Table entries are in units of UNIT,
        so that the compiler can derive alignments and use 16-byte accesses.
        """
        outer = tl.load(place + 1)
        inner = tl.load(place + 2)
        middle = tl.load(place + 4).to(tl.int32)
        length = tl.load(place + 5)
        numel = tl.load(place + 6)
        start = row.to(tl.int64) * length
        limit = tl.minimum(tl.maximum(numel - start, 0), length).to(tl.int32)
        at = (row // middle).to(tl.int64) * outer + (row % middle).to(tl.int64) * inner
        return at * UNIT, start * UNIT, limit * UNIT

    @triton.jit
    def _bfloat16(x):  # type: ignore[no-untyped-def]
        """Return the bits of the nearest bfloat16, ties to even."""
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)  # noqa: PLR0124  NaN

    @triton.jit(do_not_specialize=["seed"])
    def _words_kernel(  # type: ignore[no-untyped-def]
        table,
        of,
        payload,
        sums,
        seed,
        ROWS: tl.constexpr,
        WORDS: tl.constexpr,
        SPAN: tl.constexpr,
        SCATTER: tl.constexpr,
    ):
        """Copy SPAN words of ROWS rows of a slice that is 16-byte aligned. Table entries are in
        units of 16 bytes."""
        place, row, first = _rows_here(table, of, SPAN, ROWS)
        begin = tl.load(place + 7) * 2
        length = tl.load(place + 5).to(tl.int32) * 2
        at, start, limit = _at_rows(place, row, 2)
        base = tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.int64)), 16)
        column = first + tl.arange(0, WORDS)
        local = base + (at[:, None] + column[None, :])
        message = payload.to(tl.pointer_type(tl.int64)) + begin + (start[:, None] + column[None, :])
        key = kernel_key(begin + start[:, None] + column[None, :], seed)
        total = tl.zeros((ROWS, WORDS), dtype=tl.int64)
        for turn in range(0, tl.minimum(length - first, SPAN), WORDS):
            real = (column + turn)[None, :] < limit[:, None]
            if SCATTER:
                word = tl.load(message + turn, mask=real, other=0)
                tl.store(local + turn, word, mask=real)
            else:
                word = tl.load(local + turn, mask=real, other=0)
                tl.store(message + turn, word, mask=real)
            total += tl.where(real, kernel_mixed(word ^ kernel_mixed(key)), 0)
            key += _KEYS
        tl.store(sums + tl.program_id(0), tl.sum(total))

    @triton.jit(do_not_specialize=["seed"])
    def _elements_kernel(  # type: ignore[no-untyped-def]
        table,
        of,
        payload,
        sums,
        seed,
        WIDTH: tl.constexpr,
        CAST: tl.constexpr,
        WIDE: tl.constexpr,
        ROWS: tl.constexpr,
        WORDS: tl.constexpr,
        SPAN: tl.constexpr,
        SCATTER: tl.constexpr,
    ):
        """Copy SPAN words of ROWS rows of a slice with any strides, or cast them.

        Table entries are in elements. If everything is 16-byte aligned, they are in units of four
        elements, and the message's offset is in units of 16 bytes.
        """
        EACH: tl.constexpr = 8 // WIDTH  # elements of a word
        INT: tl.constexpr = tl.int8 if WIDTH == 1 else (tl.int16 if WIDTH == 2 else tl.int32)
        LOCAL: tl.constexpr = tl.float32 if CAST else INT
        place, row, first = _rows_here(table, of, SPAN, ROWS)
        UNIT: tl.constexpr = 4 if WIDE else 1
        base = tl.load(place).to(tl.pointer_type(LOCAL))
        last = tl.load(place + 3)
        begin = tl.load(place + 7)
        length = tl.load(place + 5).to(tl.int32) * UNIT
        has_words = tl.load(place + 10) != 0
        if WIDE:
            base = tl.multiple_of(base, 16)
            begin = begin * 16
            last = 1
        at, start, limit = _at_rows(place, row, UNIT)
        word = first + tl.arange(0, WORDS)
        element = tl.arange(0, EACH)
        column = word[:, None] * EACH + element[None, :]
        local = base + (at[:, None, None] + column[None, :, :] * last)
        message = (payload + begin).to(tl.pointer_type(INT)) + (
            start[:, None, None] + column[None, :, :]
        )
        key = kernel_key((begin + start * WIDTH)[:, None] // 8 + word[None, :], seed)
        total = tl.zeros((ROWS, WORDS), dtype=tl.int64)
        for turn in range(0, tl.minimum(length - first * EACH, SPAN * EACH), WORDS * EACH):
            real = (column + turn)[None, :, :] < limit[:, None, None]
            if SCATTER:
                bits = tl.load(message, mask=real, other=0)
                tl.store(local, bits, mask=real)
            elif CAST:
                bits = _bfloat16(tl.load(local, mask=real, other=0.0))
                tl.store(message, bits, mask=real)
            else:
                bits = tl.load(local, mask=real, other=0)
                tl.store(message, bits, mask=real)
            part = (bits.to(tl.int64) & ((1 << (8 * WIDTH)) - 1)) << (8 * WIDTH * element)[
                None, None, :
            ]
            words = tl.sum(part, axis=2)
            whole = has_words & ((word * EACH + EACH + turn)[None, :] <= limit[:, None])
            total += tl.where(whole, kernel_mixed(words ^ kernel_mixed(key)), 0)
            local += WORDS * EACH * last
            message += WORDS * EACH
            key += _KEYS
        tl.store(sums + tl.program_id(0), tl.sum(total))

    @triton.jit(do_not_specialize=["nbytes", "seed"])
    def _again_kernel(table, of, payload, sums, nbytes, seed, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Compute the checksum of the words that no tile contains entirely. The last word of a
        message is padded with zeros."""
        program = tl.program_id(0)
        place = table + tl.load(of + program).to(tl.int64) * 3
        first = tl.load(place) + (program - tl.load(place + 2)) * WORDS
        end = tl.minimum(first + WORDS, tl.load(place + 1))
        position = first + tl.arange(0, WORDS)
        last = nbytes.to(tl.int64) // 8  # the padded word
        whole = position < tl.minimum(end, last)
        word = tl.load(payload.to(tl.pointer_type(tl.int64)) + position, mask=whole, other=0)
        total = tl.sum(tl.where(whole, kernel_word(word, position, seed), 0))
        if (first <= last) & (last < end):
            total += kernel_word(kernel_tail(payload, last * 8, nbytes), last, seed)
        tl.store(sums + program, total)
