"""Assignment of slices of Hugging Face tensors to ranks for an export. Each element has exactly one
owner.

Every rank computes the same owners from the same coordinates, without communication. Among replicas
(tensor-parallel copies of norms, embeddings shared by two stages, data-parallel copies), the rank
with the fewest bytes so far becomes the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridflow.errors import ModelError
from hybridflow.models import Family
from hybridflow.models.layout import Coordinates, Piece
from hybridflow.models.stored_names import Place
from hybridflow.reshard.fsdp_layout import fsdp_tensors
from hybridflow.reshard.layout import rank_tensors
from hybridflow.reshard.proof import cover_faults

if TYPE_CHECKING:
    import torch

Owners = dict[str, list["OwnedPiece"]]  # slices of each HF tensor, ordered by rank


@dataclass(frozen=True)
class OwnedPiece:
    """A slice of a Hugging Face tensor, its owner, and the owner's local parameter from which it is
    read. `place` is the tensor's location in the export; None if it is exported under its own name.
    """

    rank: int
    parameter: str
    piece: Piece
    place: Place | None = None

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece in the exported tensor `whole`."""
        place = self.place or Place(self.piece.source)
        return place.view(whole, self.piece.source_start, self.piece.shape)


def megatron_owners(family: Family, ranks: Sequence[Coordinates]) -> Owners:
    """Assign an owner to every slice in a Megatron world. `ranks` lists the ranks' coordinates,
    indexed by global rank.

    Raises:
        ModelError: the pieces do not cover every element of every tensor exactly once.
    """
    owned = _assign_owners(family, ranks)
    _prove_cover(family.tensors(), owned)
    return {name: sorted(pieces, key=lambda one: one.rank) for name, pieces in owned.items()}


def fsdp_owners(family: Family, ranks: int) -> Owners:
    """Assign every slice to one of `ranks` FSDP ranks. There are no replicas to choose from."""
    found: Owners = {}
    for rank in range(ranks):
        for local in fsdp_tensors(family, rank, ranks):
            found.setdefault(local.name, []).extend(
                OwnedPiece(rank, local.name, piece) for piece in local.pieces
            )
    return found


def _assign_owners(family: Family, ranks: Sequence[Coordinates]) -> Owners:
    candidates: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[OwnedPiece]] = {}
    first_stage: dict[str, int] = {}
    for rank, at in enumerate(ranks):
        for local in rank_tensors(family, at):
            for piece in local.pieces:
                # embeddings shared by two stages are written by ranks of the first stage
                stage = first_stage.setdefault(piece.source, at.pp_rank)
                if stage == at.pp_rank:
                    candidates.setdefault(piece.region, []).append(
                        OwnedPiece(rank, local.name, piece)
                    )
    load = [0] * len(ranks)
    owned: Owners = {}
    for options in candidates.values():
        chosen = min(options, key=lambda option: (load[option.rank], option.rank))
        load[chosen.rank] += chosen.piece.numel
        owned.setdefault(chosen.piece.source, []).append(chosen)
    return owned


def _prove_cover(
    shapes: Mapping[str, tuple[int, ...]], owned: Mapping[str, Sequence[OwnedPiece]]
) -> None:
    unknown = sorted(owned.keys() - shapes.keys())
    missing = sorted(shapes.keys() - owned.keys())
    if unknown or missing:
        raise ModelError(
            f"the family's map contains tensors that are not in its checkpoint {unknown[:4]}, or "
            f"omits {missing[:4]}"
        )
    names = list(shapes)
    axes = max(map(len, shapes.values()))

    def padded(numbers: Sequence[int], filler: int) -> list[int]:
        return [*numbers, *[filler] * (axes - len(numbers))]

    numbers = []
    starts = []
    sizes = []
    for number, name in enumerate(names):
        for one in owned[name]:
            numbers.append(number)
            starts.append(padded(one.piece.source_start, 0))
            sizes.append(padded(one.piece.shape, 1))
    wholes = [padded(shape, 1) for shape in shapes.values()]
    faults = cover_faults(*map(np.array, (numbers, starts, sizes, wholes)))
    for fault in faults:
        name = names[fault.key]
        if fault.kind == "beyond":
            raise ModelError(f"a piece of {name} extends beyond its shape {shapes[name]}")
        raise ModelError(
            f"the pieces of {name} {shapes[name]} do not cover every element exactly once"
        )
