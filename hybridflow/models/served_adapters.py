"""Low-rank adapters that engines apply separately, without merging them into the weights
(`actor.lora.sync=adapter`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServedAdapters:
    """The adapters of a run, described by Hugging Face names.

    Attributes:
        scale: factor of the product B A.
        factors: {weight: names of its A [rank, in] and B [out, rank]}. Weights that share an A
            factor list the same name.
        shapes: {factor: shape}.
    """

    scale: float
    factors: Mapping[str, tuple[str, str]]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def rank(self) -> int:
        """Rank of the adapters."""
        return next(self.shapes[a][0] for a, _ in self.factors.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON-able data."""
        return {
            "scale": self.scale,
            "factors": {weight: list(pair) for weight, pair in self.factors.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServedAdapters:
        """Rebuild a description from `to_dict`."""
        return cls(
            float(data["scale"]),
            {weight: (a, b) for weight, (a, b) in data["factors"].items()},
            {name: tuple(shape) for name, shape in data["shapes"].items()},
        )
