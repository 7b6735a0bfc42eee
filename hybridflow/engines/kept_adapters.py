"""Low-rank adapters in an engine's ranks. Each adapted linear gets two buffers (A and B), and adds
their product with its input to its output.

The weight sync writes the buffers like any other tensor. Their layout follows from the traced
layout of the weights: B is sharded like the weight's rows and A like its columns. In a linear that
tensor parallelism splits by rows, every rank therefore stores all of A and its own rows of B. In a
linear split by columns, each rank adds a partial sum, which the linear's reduction completes.
Adapters need no further communication.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.engines.layout_tracer import TracedLayout, TracedPiece
from hybridflow.errors import WeightSyncError
from hybridflow.models.served_adapters import ServedAdapters

A = "adapter_a"
B = "adapter_b"
_REMEDY = "set actor.lora.sync=merged, or choose other actor.lora.targets"


def keep(model: Any, traced: TracedLayout, adapters: ServedAdapters) -> TracedLayout:
    """Add adapters to the model's linears, and return the traced layout with the adapters' buffers.

    Adapters are zero until they are received. Linears that already have adapters are unchanged.

    Args:
        traced: the layout of the weights.

    Raises:
        WeightSyncError: a linear does not support adapters. The message names the linear.
    """
    pieces: dict[str, list[TracedPiece]] = {}
    for piece in traced.pieces:
        if piece.source in adapters.factors:
            pieces.setdefault(piece.buffer, []).append(piece)
    _check(traced, pieces, adapters)
    buffers = dict(traced.buffers)
    further: list[TracedPiece] = []
    for name, own in pieces.items():
        module = name.removesuffix(".weight")
        shape, dtype = traced.buffers[name]
        _hold(model.get_submodule(module), name, adapters)
        buffers[f"{module}.{A}"] = ((adapters.rank, shape[1]), dtype)
        buffers[f"{module}.{B}"] = ((shape[0], adapters.rank), dtype)
        further += _factors(module, own, adapters)
    untouched = tuple(name for name in traced.untouched if not name.endswith((f".{A}", f".{B}")))
    return replace(traced, buffers=buffers, pieces=(*traced.pieces, *further), untouched=untouched)


def _check(
    traced: TracedLayout, pieces: Mapping[str, Sequence[TracedPiece]], adapters: ServedAdapters
) -> None:
    for name, own in pieces.items():
        shape, _ = traced.buffers[name]
        if len(shape) != 2 or name in traced.transposed or not name.endswith(".weight"):
            raise WeightSyncError(
                f"{name} {shape} in the engine does not support an adapter; {_REMEDY}"
            )
        others = {
            str(piece.source)
            for piece in traced.pieces
            if piece.buffer == name and piece.source not in adapters.factors
        }
        shared = {adapters.factors[str(piece.source)][0] for piece in own}
        if others or len(shared) > 1:
            raise WeightSyncError(
                f"{name} in the engine fuses linears that the trainer adapts separately: "
                f"{', '.join(sorted({str(piece.source) for piece in own} | others)[:4])}; {_REMEDY}"
            )


def _factors(
    module: str, pieces: Sequence[TracedPiece], adapters: ServedAdapters
) -> list[TracedPiece]:
    """Return the rectangles of both factors that correspond to the given rectangles of the
    weight.
    """
    rank = adapters.rank
    of_a: dict[int, TracedPiece] = {}
    of_b: list[TracedPiece] = []
    for piece in pieces:
        a, b = adapters.factors[str(piece.source)]
        (row, column), (rows, columns) = piece.start, piece.shape
        local_row, local_column = piece.local_start
        whole = (rank, columns)
        of_a[local_column] = TracedPiece(
            a, (0, column), whole, f"{module}.{A}", (0, local_column), whole
        )
        share = (rows, rank)
        of_b.append(TracedPiece(b, (row, 0), share, f"{module}.{B}", (local_row, 0), share))
    return [*of_a.values(), *of_b]


def _hold(linear: Any, name: str, adapters: ServedAdapters) -> None:
    """Register the factors as buffers of a linear, and make its forward pass add the adapter."""
    if hasattr(linear, A):
        return
    method = getattr(linear, "quant_method", None)
    weight = getattr(linear, "weight", None)
    if not hasattr(method, "apply") or not isinstance(weight, torch.Tensor):
        raise WeightSyncError(
            f"the engine computes {name} in {type(linear).__name__}, which does not support "
            f"adapters; {_REMEDY}"
        )
    if weight.device.type != "cpu":
        raise WeightSyncError(
            "engines on GPUs capture CUDA graphs before adapters are added; set "
            "actor.lora.sync=merged"
        )
    rows, columns = weight.shape
    for buffer, shape in ((A, (adapters.rank, columns)), (B, (rows, adapters.rank))):
        zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        linear.register_buffer(buffer, zeros, persistent=False)
    linear.quant_method = _adapted(method, adapters.scale)


def _adapted(method: Any, scale: float) -> Any:
    """Return a copy of the linear's `quant_method` that adds the adapter's output before any
    reduction."""
    original = method.apply

    def apply(
        linear: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **further: Any
    ) -> torch.Tensor:
        out: torch.Tensor = original(linear, x, bias, **further)
        low = F.linear(x, linear.adapter_a) * scale
        return out + F.linear(low, linear.adapter_b)

    adapted = copy.copy(method)
    adapted.apply = apply
    return adapted
