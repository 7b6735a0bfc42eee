"""Discovery of an engine's weight layout. The engine's own loader runs on tensors without storage,
and its copies are recorded instead of executed.

`trace_layout` calls the model's `load_weights` with a meta tensor for each HF tensor. A dispatch
mode follows every view that the loader creates. A `copy_` into a parameter is recorded as (HF
rectangle) -> (rectangle of the buffer), but not executed. The same applies to `zero_` and `fill_`,
which loaders use to clear padding. The live weights of a running engine are not touched. Sources
joined by `cat` or `stack` (DeepSeek's fused latent projection) are resolved to their parts. A
buffer that is filled from transposed tensors (gpt-oss's experts) is described by its transpose.
Uses torch only, and works for any module, on its device or on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.errors import WeightSyncError
from hybridflow.reshard.layout import PADDING, Catalog, RankLayout, padded
from hybridflow.reshard.regions import Box, subtract

Shape = tuple[int, ...]
# HF name (None: zeros), start and shape in it, and (offset, length) per axis of the resolved tensor
Resolved = tuple[str | None, Shape, Shape, list[tuple[int, int]]]
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
_COPIES = ("_to_copy", "clone", "contiguous", "detach")  # operations that keep the contents


@dataclass(frozen=True)
class TracedPiece:
    """A recorded copy from `source[start : +shape]` of an HF tensor to `buffer[local_start :
    +local_shape]`, in the same element order. If `source` is None, the loader fills the elements
    with the constant `fill`.
    """

    source: str | None
    start: Shape
    shape: Shape
    buffer: str
    local_start: Shape
    local_shape: Shape
    fill: float = 0.0


@dataclass(frozen=True)
class TracedLayout:
    """The traced copies: `buffers` {name: (shape, dtype)}, `pieces` in copy order, and the
    `untouched` buffers, which the loader did not write. For `transposed` buffers, shapes and pieces
    refer to the transpose (last two axes exchanged)."""

    buffers: dict[str, tuple[Shape, str]]
    pieces: tuple[TracedPiece, ...]
    untouched: tuple[str, ...]
    transposed: tuple[str, ...] = ()

    def rank_layout(self, catalog: Catalog) -> RankLayout:
        """Return this rank's layout for the slice plan: the written buffers and their pieces.
        Elements that the loader clears but never overwrites become padding.

        Raises:
            WeightSyncError: a tensor has more dimensions than a plan supports.
        """
        index = catalog.index()
        names = [name for name in self.buffers if name not in self.untouched]
        number = {name: position for position, name in enumerate(names)}
        rows: list[Shape] = []

        def add(tensor: int, start: Shape, size: Shape, buffer: str, place: Shape) -> None:
            region = (*padded(start, 0), *padded(size, 1))
            rows.append((tensor, *region, number[buffer], *padded(place, 0)))

        written: dict[str, list[Box]] = {name: [] for name in names}
        for piece in self.pieces:
            if piece.source is not None:
                tensor = index[piece.source]
                add(tensor, piece.start, piece.shape, piece.buffer, piece.local_start)
                written[piece.buffer].append((piece.local_start, piece.local_shape))
        for piece in self.pieces:
            if piece.source is None:
                rest: list[Box] = [(piece.local_start, piece.local_shape)]
                for cut in written[piece.buffer]:
                    rest = [part for box in rest for part in subtract(box, cut)]
                if rest and piece.fill:
                    raise WeightSyncError(
                        f"the loader leaves part of {piece.buffer} filled with the constant "
                        f"{piece.fill}; only zero is supported"
                    )
                written[piece.buffer] += rest
                for start, size in rest:
                    add(PADDING, start, size, piece.buffer, start)
        shapes = [self.buffers[name][0] for name in names]
        dtypes = [self.buffers[name][1] for name in names]
        return RankLayout.of_rows(names, dtypes, shapes, rows)


def trace_layout(
    module: torch.nn.Module,
    load_weights: Loader,
    tensors: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> TracedLayout:
    """Trace how `load_weights` (of `module` or its wrapper) loads the HF tensors {name: shape}.

    Args:
        dtype: dtype of the tensors that are not in `dtypes`. `dtypes` lists block-wise fp8 tensors
            and their scales.

    Raises:
        WeightSyncError: the loader copies from something other than an HF tensor, or copies
            something other than a rectangle. The message names the source and the buffer.
    """
    buffers = dict(module.named_parameters(remove_duplicate=True)) | dict(module.named_buffers())
    kinds = dtypes or {}
    sources = {}
    for name, full in tensors.items():
        sources[name] = torch.empty(tuple(full), dtype=kinds.get(name, dtype), device="meta")
    recorder = _Recorder(sources, buffers)
    with torch.no_grad(), recorder:
        load_weights(iter(list(sources.items())))
    turned = recorder.turned
    pieces = []
    for piece in recorder.pieces:
        pieces.append(_exchanged(piece) if turned.get(piece.buffer) else piece)
    described = {}
    for name, tensor in buffers.items():
        shape = tensor.mT.shape if turned.get(name) else tensor.shape
        described[name] = (tuple(shape), str(tensor.dtype).removeprefix("torch."))
    written = {piece.buffer for piece in pieces}
    untouched = tuple(name for name in buffers if name not in written)
    transposed = tuple(name for name, is_turned in turned.items() if is_turned)
    return TracedLayout(described, tuple(pieces), untouched, transposed)


@dataclass
class _Joined:
    """The parts of a `cat` or `stack` along an axis, in order."""

    axis: int
    stacked: bool
    parts: list[torch.Tensor] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, sources: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self.from_storage = {_storage(tensor): name for name, tensor in sources.items()}
        self.buffers = buffers
        self.to_storage = {_storage(tensor): name for name, tensor in buffers.items()}
        self.joined: dict[int, tuple[_Joined, Shape]] = {}
        self.pieces: list[TracedPiece] = []
        # {buffer: True if it is filled from transposed tensors}, decided by its first copy
        self.turned: dict[str, bool] = {}
        # storages created as zeros and not written since, i.e. padding
        self.zeros: set[int] = set()
        # keeps tensors alive, because an address identifies a storage only while it exists
        self._keep: list[Any] = list(sources.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        target: Any = args[0] if args else None
        if name in ("copy_", "zero_", "fill_") and _storage(target) in self.to_storage:
            if name == "copy_":
                self._copy(target, args[1])
            else:
                self._fill(target, float(args[1]) if name == "fill_" else 0.0)
            return target
        result = func(*args, **kwargs)
        if name.endswith("_") and isinstance(target, torch.Tensor):
            # a loader clears tensors that another rank contributes (biases of row-split layers)
            storage = _storage(target)
            if name == "zero_" and storage in self.from_storage:
                self.zeros.add(storage)
            else:
                self.zeros.discard(storage)
        elif name in ("zeros", "new_zeros", "zeros_like"):
            self._keep.append(result)
            self.zeros.add(_storage(result))
        if name in ("cat", "stack"):
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            self._join(target, axis, name == "stack", result)
        elif name in _COPIES and _storage(target) != _storage(result):
            self._alias(target, result)
        return result

    # ---- operations on sources

    def _join(
        self, parts: Sequence[torch.Tensor], axis: int, stacked: bool, result: torch.Tensor
    ) -> None:
        """Record the parts of a `cat` or `stack`."""
        self._keep.append((list(parts), result))
        join = _Joined(axis % result.ndim, stacked, list(parts))
        self.joined[_storage(result)] = (join, tuple(result.shape))

    def _alias(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Record that a converted or cloned tensor has the contents of the original."""
        storage = _storage(tensor)
        if storage in self.from_storage or storage in self.joined:
            self._keep.append((tensor, result))
            self.joined[_storage(result)] = (_Joined(0, False, [tensor]), tuple(result.shape))

    # ---- operations on buffers

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.numel():  # all vocabulary rows of this rank are padding
            return
        buffer = self.to_storage[_storage(target)]
        if tuple(source.shape) != tuple(target.shape):
            try:
                source = source.expand(target.shape)
            except RuntimeError:
                raise WeightSyncError(
                    f"the loader copies a tensor of shape {tuple(source.shape)} into a slice of "
                    f"{buffer} of shape {tuple(target.shape)}"
                ) from None
        if buffer not in self.turned:
            self.turned[buffer] = self._is_transposed(source)
        turned = self.turned[buffer]
        if turned:
            source = source.mT
            target = target.mT
        for name, start, shape, inside in self._resolve(source, buffer):
            view = target
            for axis, (offset, size) in enumerate(inside):
                view = view.narrow(axis, offset, size)
            self._record(name, start, shape, view.mT if turned else view, buffer, 0.0)

    def _is_transposed(self, source: torch.Tensor) -> bool:
        """Return True if only the transpose of this view is a rectangle of an HF tensor."""
        name = self.from_storage.get(_storage(source), "")
        shape = self.shapes.get(name, ())
        if source.ndim < 2 or source.ndim != len(shape) or _rectangle(source, shape, 0):
            return False
        return _rectangle(source.mT, shape, 0) is not None

    def _fill(self, target: torch.Tensor, value: float) -> None:
        if target.numel():
            self._record(None, (), (), target, self.to_storage[_storage(target)], value)

    def _record(
        self,
        name: str | None,
        start: Shape,
        shape: Shape,
        view: torch.Tensor,
        buffer: str,
        fill: float,
    ) -> None:
        whole = self.buffers[buffer]
        place = _rectangle(view, tuple(whole.shape), int(whole.storage_offset()))
        if place is None:
            raise WeightSyncError(
                f"the loader writes {name or 'a constant'} to a non-rectangular slice of {buffer}: "
                f"stride {view.stride()}"
            )
        self.pieces.append(TracedPiece(name, start, shape, buffer, *place, fill))

    def _resolve(self, tensor: torch.Tensor, buffer: str) -> Iterator[Resolved]:
        """Yield (HF name, start, shape, region of `tensor`) for every HF tensor that `tensor`
        contains a part of. The name is None if `tensor` consists of zeros.
        """
        key = _storage(tensor)
        everything = [(0, size) for size in tensor.shape]
        if key in self.zeros:
            if tensor.numel():
                yield None, (), (), everything
            return
        if key in self.from_storage:
            name = self.from_storage[key]
            place = _rectangle(tensor, self.shapes[name], 0)
            if place is None:
                raise WeightSyncError(
                    f"the loader reads a non-rectangular slice of {name} for {buffer}: "
                    f"stride {tensor.stride()}"
                )
            yield name, *place, everything
            return
        if key not in self.joined:
            raise WeightSyncError(
                f"the loader fills {buffer} from a source that is not an HF tensor (shape "
                f"{tuple(tensor.shape)})"
            )
        join, shape = self.joined[key]
        place = _rectangle(tensor, shape, 0)
        if place is None or len(shape) != tensor.ndim:
            raise WeightSyncError(
                f"the loader reads a non-rectangular slice of joined tensors for {buffer}: "
                f"stride {tensor.stride()}"
            )
        yield from self._resolve_parts(join, *place, buffer)

    def _resolve_parts(
        self, join: _Joined, start: Shape, size: Shape, buffer: str
    ) -> Iterator[Resolved]:
        along = join.axis
        first = start[along]
        end = first + size[along]
        row = 0
        for part in join.parts:
            view = part.unsqueeze(along) if join.stacked else part
            rows = view.shape[along]
            low = max(row, first)
            high = min(row + rows, end)
            if low < high:
                for axis in range(view.ndim):
                    if axis == along:
                        view = view.narrow(axis, low - row, high - low)
                    else:
                        view = view.narrow(axis, start[axis], size[axis])
                for name, begin, extent, inside in self._resolve(view, buffer):
                    place = list(inside)
                    offset, length = place[along]
                    place[along] = (offset + low - first, length)
                    yield name, begin, extent, place
            row += rows


def _exchanged(piece: TracedPiece) -> TracedPiece:
    """Return the piece with its location expressed in the transpose of its buffer."""
    *outer, row, column = zip(piece.local_start, piece.local_shape, strict=True)
    start, shape = zip(*outer, column, row, strict=True)
    return replace(piece, local_start=start, local_shape=shape)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _rectangle(view: torch.Tensor, full: Shape, base: int) -> tuple[Shape, Shape] | None:
    """Return (start, shape) of the rectangle that a view covers in a contiguous tensor of shape
    `full`, or None if it is not a rectangle.

    Axes of length one may be missing from or added to the view.
    """
    strides = [prod(full[axis + 1 :]) for axis in range(len(full))]
    offset = view.storage_offset() - base
    start = []
    for stride in strides:
        first = offset // stride if stride else 0
        start.append(first)
        offset -= first * stride
    shape = [1] * len(full)
    axis = 0
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            continue
        while axis < len(full) and (strides[axis] != stride or full[axis] == 1):
            axis += 1
        if axis == len(full) or start[axis] + length > full[axis]:
            return None
        shape[axis] = length
        axis += 1
    return tuple(start), tuple(shape)
