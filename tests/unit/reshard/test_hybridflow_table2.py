"""Table 2 of the HybridFlow paper (arXiv 2409.19256), counted element by element.

Three designs bring training weights (p·t·d ranks) to generation weights (t_g ranks a replica). The
model is a stack of matrices: tensor parallelism cuts rows, pipeline parallelism cuts layers, ZeRO
cuts every matrix's elements over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

LAYERS = 4
ROWS = 64
COLUMNS = 6
SIZE = LAYERS * ROWS * COLUMNS


@dataclass(frozen=True)
class Design:
    """Sizes of training (pipeline, tensor, data) and tensor ranks of a generation replica."""

    name: str
    p: int
    t: int
    d: int
    t_g: int

    @property
    def world(self) -> range:
        return range(self.p * self.t * self.d)

    def copy_of(self, rank: int) -> list[int]:
        """Ranks that train one copy of the model; they are numbered tensor, data, pipeline."""
        if self.name == "ds_chat":
            return list(self.world)
        data = rank // self.t % self.d
        return [other for other in self.world if other // self.t % self.d == data]

    def shard(self, rank: int) -> int:
        """Index of the generation shard that a rank serves."""
        if self.name == "hybridflow":  # the shard that its training shard is a part of
            return rank % self.t // (self.t // self.t_g)
        return rank % self.t_g

    def group(self, rank: int) -> list[int]:
        """Ranks whose training weights are gathered on this rank."""
        if self.name == "hybridflow":  # the micro data-parallel group
            return [other for other in self.copy_of(rank) if self.shard(other) == self.shard(rank)]
        return self.copy_of(rank)

    def trained(self, rank: int) -> np.ndarray:
        """Mask [layers, rows, columns] of the weights that a rank trains."""
        held = np.zeros((LAYERS, ROWS, COLUMNS), bool)
        if self.name == "ds_chat":
            elements = part(ROWS * COLUMNS, rank, len(self.world))
            held.reshape(LAYERS, -1)[:, elements] = True
        else:
            stage = rank // (self.t * self.d)
            held[part(LAYERS, stage, self.p), part(ROWS, rank % self.t, self.t)] = True
        return held

    def generated(self, rank: int) -> np.ndarray:
        """Mask of the weights that a rank generates with."""
        held = np.zeros((LAYERS, ROWS, COLUMNS), bool)
        held[:, part(ROWS, self.shard(rank), self.t_g)] = True
        return held

    def formulas(self) -> dict[str, Fraction]:
        """Shares of the model as the paper prints them (p_g = 1)."""
        tp = self.t * self.p
        tpd = tp * self.d
        rows = {
            "ds_chat": (Fraction(tpd - 1, tpd), Fraction(1), Fraction(1, tpd)),
            "hybridflow_v": (Fraction(tp - 1, tp), Fraction(1), Fraction(1, tp)),
            "hybridflow": (
                Fraction(tp - self.t_g, self.t_g * tp),
                Fraction(1, self.t_g),
                Fraction(0),
            ),
        }
        return dict(zip(("received", "peak", "redundancy"), rows[self.name], strict=True))


def part(whole: int, index: int, count: int) -> slice:
    return slice(index * whole // count, (index + 1) * whole // count)


@pytest.mark.parametrize("sizes", [(2, 4, 1, 2), (1, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["ds_chat", "hybridflow_v", "hybridflow"])
def test_volumes_peaks_and_redundancy_are_those_of_the_paper(
    name: str, sizes: tuple[int, int, int, int]
) -> None:
    design = Design(name, *sizes)
    most = {"received": 0, "peak": 0, "redundancy": 0}
    for rank in design.world:
        parts = {other: design.trained(other) for other in design.group(rank)}
        assert (sum(parts.values()) >= design.generated(rank)).all(), (
            "a generation weight is missing"
        )
        sizes_of = {other: int(held.sum()) for other, held in parts.items()}
        idle = design.trained(rank) & ~design.generated(rank)
        most["received"] = max(most["received"], sum(sizes_of.values()) - sizes_of[rank])
        most["peak"] = max(most["peak"], sum(sizes_of.values()))
        most["redundancy"] = max(most["redundancy"], int(idle.sum()))
    assert most == {name: share * SIZE for name, share in design.formulas().items()}
