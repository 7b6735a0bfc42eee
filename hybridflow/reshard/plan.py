"""Plan how the ranks of one pipeline stage hand their pieces to the stage's leader, each element once.

Pure: knows layouts (`hybridflow.models.layout`), neither Megatron nor processes. Every rank computes the same plan from
the same coordinates, so nothing but tensor bytes needs to travel. Replicas (tensor-parallel copies of norms, tied
embeddings on two stages) are sent by one owner, the one with the fewest bytes so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hybridflow.errors import WeightSyncError
from hybridflow.models import Family
from hybridflow.models.layout import Coordinates, Piece
from hybridflow.reshard.layout import rank_tensors


@dataclass(frozen=True)
class OwnedPiece:
    """A piece, the rank that sends it, and the local parameter it is read from."""

    rank: int
    parameter: str
    piece: Piece


@dataclass(frozen=True)
class Bucket:
    """Whole HF tensors that travel together: bounded by the plan's `bucket_bytes` (a single larger tensor travels
    alone)."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    pieces: tuple[OwnedPiece, ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(prod(shape) for _, shape in self.tensors)


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: its leader (global rank) assembles the buckets in order."""

    stage: int
    leader: int
    buckets: tuple[Bucket, ...]


def plan_stages(
    family: Family, ranks: Sequence[Coordinates], bucket_bytes: int, bytes_per_element: int
) -> list[StagePlan]:
    """Assign every region of every HF tensor to one owning rank and group tensors into buckets by stage.

    Args:
        ranks: coordinates by global rank.
        bucket_bytes: upper bound of one bucket in bytes (unless a single tensor is larger).
        bytes_per_element: of the dtype on the wire.

    Raises:
        WeightSyncError: the pieces do not cover every element of every tensor exactly once.
    """
    shapes = family.tensors()
    owned = _assign_owners(family, ranks)
    _prove_cover(shapes, owned)
    by_stage: dict[int, dict[str, list[OwnedPiece]]] = {}
    for name in shapes:
        # a tensor whose replicas stand on several stages (tied embeddings) has one owner per region, all on the same
        # stage
        stage = ranks[owned[name][0].rank].pp_rank
        by_stage.setdefault(stage, {})[name] = owned[name]
    plans = []
    for stage, tensors in sorted(by_stage.items()):
        leader = min(rank for rank, at in enumerate(ranks) if at.pp_rank == stage)
        plans.append(StagePlan(stage, leader, tuple(_buckets(tensors, shapes, bucket_bytes // bytes_per_element))))
    return plans


def _assign_owners(family: Family, ranks: Sequence[Coordinates]) -> dict[str, list[OwnedPiece]]:
    candidates: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[OwnedPiece]] = {}
    first_stage: dict[str, int] = {}
    for rank, at in enumerate(ranks):
        for local in rank_tensors(family, at):
            for piece in local.pieces:
                stage = first_stage.setdefault(piece.source, at.pp_rank)
                if stage == at.pp_rank:
                    candidates.setdefault(piece.region, []).append(OwnedPiece(rank, local.name, piece))
    load = [0] * len(ranks)
    owned: dict[str, list[OwnedPiece]] = {}
    for options in candidates.values():
        chosen = min(options, key=lambda option: (load[option.rank], option.rank))
        load[chosen.rank] += chosen.piece.numel
        owned.setdefault(chosen.piece.source, []).append(chosen)
    return owned


def _prove_cover(shapes: Mapping[str, tuple[int, ...]], owned: Mapping[str, Sequence[OwnedPiece]]) -> None:
    unknown, missing = sorted(owned.keys() - shapes.keys()), sorted(shapes.keys() - owned.keys())
    if unknown or missing:
        raise WeightSyncError(
            f"the family's map names tensors that are not in its checkpoint {unknown[:4]}, or leaves out {missing[:4]}"
        )
    for name, shape in shapes.items():
        pieces = [option.piece for option in owned[name]]
        if any(
            start + size > full
            for p in pieces
            for start, size, full in zip(p.source_start, p.shape, shape, strict=True)
        ):
            raise WeightSyncError(f"a piece of {name} reaches beyond its shape {shape}")
        if sum(piece.numel for piece in pieces) != prod(shape) or _any_overlap(pieces):
            raise WeightSyncError(f"the pieces of {name} {shape} do not cover every element exactly once")


def _any_overlap(pieces: Sequence[Piece]) -> bool:
    # sorted by the first row, only pieces whose row ranges meet need to be compared
    ordered = sorted(pieces, key=lambda piece: piece.source_start)
    for index, piece in enumerate(ordered):
        end = piece.source_start[0] + piece.shape[0]
        for other in ordered[index + 1 :]:
            if other.source_start[0] >= end:
                break
            spans = zip(piece.source_start, piece.shape, other.source_start, other.shape, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in spans):
                return True
    return False


def _travelling_together(names: Iterable[str]) -> list[list[str]]:
    """Names in order, in lists that must not be split over buckets.

    SGLang joins DeepSeek's two down projections into one parameter, and waits for the second only within one call of
    its loader (models/deepseek_common/deepseek_weight_loader.py, `cached_a_proj`): apart they would be dropped without
    a word.
    """
    first, second = ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight"
    ordered = list(names)
    partner = {name: name.removesuffix(first) + second for name in ordered if name.endswith(first)}
    followers = set(partner.values())
    return [[name, partner[name]] if name in partner else [name] for name in ordered if name not in followers]


def _buckets(
    tensors: Mapping[str, list[OwnedPiece]], shapes: Mapping[str, tuple[int, ...]], max_elements: int
) -> list[Bucket]:
    buckets: list[Bucket] = []
    names: list[str] = []
    elements = 0

    def close() -> None:
        pieces = sorted((p for name in names for p in tensors[name]), key=lambda p: p.rank)
        buckets.append(Bucket(tuple((name, shapes[name]) for name in names), tuple(pieces)))

    for together in _travelling_together(tensors):
        numel = sum(prod(shapes[name]) for name in together)
        if names and elements + numel > max_elements:
            close()
            names, elements = [], 0
        names += together
        elements += numel
    if names:
        close()
    return buckets
