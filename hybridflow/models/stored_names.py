"""Where the files of a folder have the tensors of a model.

Most folders have each tensor under the name that the family's map uses. In a folder with a vision
tower, the text model's names have a prefix: `language_model.` where the tower was put next to a
whole text model (Gemma 3, Mistral 3), or `model.language_model.` (Qwen3.5, and what transformers 5
holds in memory). The experts of a layer may be stacked in two tensors, `gate_up_proj` [experts, 2
ffn, hidden] with the gate's rows first, and `down_proj` [experts, hidden, ffn] (Qwen3.5).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<part>\w+)_proj\.weight")
_HALVES = {"gate": 0, "up": 1}
_TOWER = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")


@dataclass(frozen=True)
class Place:
    """The place of a tensor of the model in a folder.

    Attributes:
        tensor: name in the folder.
        expert: index in a tensor that stacks the experts of a layer; None: the whole tensor.
        half: which half of the expert's rows; None: all of them.
    """

    tensor: str
    expert: int | None = None
    half: int | None = None

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the model's tensor, given that of the folder's."""
        if self.expert is None:
            return tuple(stored)
        _, rows, columns = stored
        return (rows if self.half is None else rows // 2, columns)

    def region(
        self, start: Sequence[int], shape: Sequence[int], stored: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (start, shape) in the folder's tensor, of shape `stored`, of a region of the
        model's tensor."""
        if self.expert is None:
            return tuple(start), tuple(shape)
        row, column = start
        first = stored[1] // 2 if self.half == 1 else 0
        return (self.expert, first + row, column), (1, *shape)


def place_of(name: str, held: Container[str]) -> Place | None:
    """Return the place of a tensor of the model among the tensors `held` by a folder; None if the
    folder does not have it."""
    if (found := _named(name, held)) is not None:
        return Place(found)
    if (parts := _EXPERT.fullmatch(name)) is None:
        return None
    half = _HALVES.get(parts["part"])
    stack = "down_proj" if half is None else "gate_up_proj"
    found = _named(f"{parts['experts']}.{stack}", held)
    return None if found is None else Place(found, int(parts["number"]), half)


def tower_part(name: str) -> str | None:
    """Return the module, such as `model.visual`, of a tensor of a vision tower or its projector;
    None for other tensors."""
    found = _TOWER.match(name)
    return None if found is None else found[0].removesuffix(".")


def _named(name: str, held: Container[str]) -> str | None:
    return next((other for other in _forms(name) if other in held), None)


def _forms(name: str) -> Iterator[str]:
    yield name
    yield f"language_model.{name}"
    if name.startswith("model."):
        yield f"model.language_model.{name.removeprefix('model.')}"
