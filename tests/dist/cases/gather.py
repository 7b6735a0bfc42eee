"""Whole HF tensors, assembled on the leader of each pipeline stage from its ranks' pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist

from hybridflow.models import Family
from hybridflow.models.layout import Coordinates
from hybridflow.saving.ownership import OwnedPiece, megatron_owners

_TAG = 7311


@dataclass(frozen=True)
class Bucket:
    """Whole HF tensors that travel together."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    pieces: tuple[OwnedPiece, ...]


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: its leader (global rank) assembles the buckets in order."""

    stage: int
    leader: int
    buckets: tuple[Bucket, ...]


def plan_stages(
    family: Family, ranks: Sequence[Coordinates], bucket_bytes: int, bytes_per_element: int
) -> list[StagePlan]:
    """Group whole tensors into buckets of at most `bucket_bytes` (a single larger tensor travels
    alone), by stage."""
    shapes = family.tensors()
    by_stage = dict[int, dict[str, list[OwnedPiece]]]()
    for name, owned in megatron_owners(family, ranks).items():
        by_stage.setdefault(ranks[owned[0].rank].pp_rank, {})[name] = owned
    plans = []
    for stage, tensors in sorted(by_stage.items()):
        leader = min(rank for rank, at in enumerate(ranks) if at.pp_rank == stage)
        plans.append(
            StagePlan(
                stage, leader, tuple(_buckets(tensors, shapes, bucket_bytes // bytes_per_element))
            )
        )
    return plans


def _buckets(
    tensors: Mapping[str, list[OwnedPiece]],
    shapes: Mapping[str, tuple[int, ...]],
    max_elements: int,
) -> list[Bucket]:
    buckets: list[Bucket] = []
    names: list[str] = []
    elements = 0

    def close() -> None:
        pieces = sorted((p for name in names for p in tensors[name]), key=lambda p: p.rank)
        buckets.append(Bucket(tuple((name, shapes[name]) for name in names), tuple(pieces)))

    for name in tensors:
        numel = prod(shapes[name])
        if names and elements + numel > max_elements:
            close()
            names = []
            elements = 0
        names.append(name)
        elements += numel
    if names:
        close()
    return buckets


@torch.no_grad()
def gather_stage(
    plan: StagePlan, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield, for each bucket, the whole tensors {HF name: [shape] of `dtype`} on the stage's
    leader, an empty dict elsewhere.

    Called by every rank of the stage, which must exhaust the iterator. One message per rank and
    bucket; at most one bucket is in memory.
    """
    rank = dist.get_rank()
    for bucket in plan.buckets:
        mine = [owned for owned in bucket.pieces if owned.rank == rank]
        parts = [_local(parameters[owned.parameter], owned).to(dtype) for owned in mine]
        packed = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        if rank == plan.leader:
            yield _assemble(bucket, packed, rank)
            continue
        if mine:
            dist.send(packed, plan.leader, tag=_TAG)
        yield {}


def _local(values: torch.Tensor, owned: OwnedPiece) -> torch.Tensor:
    """The piece `[n]` of a buffer whose shape may be padded with ones from the left."""
    slices = owned.piece.slices()
    return values[(0,) * (values.dim() - len(slices))][slices].reshape(-1)


def _assemble(bucket: Bucket, own: torch.Tensor, leader: int) -> dict[str, torch.Tensor]:
    whole = {name: own.new_empty(shape) for name, shape in bucket.tensors}
    for sender, group in groupby(bucket.pieces, key=lambda owned: owned.rank):
        pieces = [owned.piece for owned in group]
        packed = own
        if sender != leader:
            packed = own.new_empty(sum(piece.numel for piece in pieces))
            dist.recv(packed, sender, tag=_TAG)
        for piece, values in zip(
            pieces, packed.split([piece.numel for piece in pieces]), strict=True
        ):
            region = tuple(
                slice(start, start + size)
                for start, size in zip(piece.source_start, piece.shape, strict=True)
            )
            whole[piece.source][region] = values.view(piece.shape)
    return whole
