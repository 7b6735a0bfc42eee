"""The names under which a checkpoint folder stores the tensors of a model.

Most folders use the same tensor names as the family. In a folder with a vision tower, the text
model's names have a prefix: `language_model.` if the tower was added to a complete text model
(Gemma 3, Mistral 3), or `model.language_model.` (Qwen3.5, and models in memory in transformers 5).
A layer's experts may be stacked in two tensors, `gate_up_proj` [experts, 2 ffn, hidden] with the
gate's rows first, and `down_proj` [experts, hidden, ffn] (Qwen3.5).
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
    """The location of a model tensor in a checkpoint folder.

    Attributes:
        tensor: name of the stored tensor.
        expert: index of the expert, if the stored tensor stacks a layer's experts; None if it does
            not.
        half: which half of the expert's rows (0 or 1); None for all rows.
    """

    tensor: str
    expert: int | None = None
    half: int | None = None

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the model tensor, given the shape `stored` of the tensor in the
        folder."""
        if self.expert is None:
            return tuple(stored)
        _, rows, columns = stored
        return (rows if self.half is None else rows // 2, columns)

    def region(
        self, start: Sequence[int], shape: Sequence[int], stored: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Convert a region of the model tensor to (start, shape) in the stored tensor, whose shape
        is `stored`."""
        if self.expert is None:
            return tuple(start), tuple(shape)
        row, column = start
        first = stored[1] // 2 if self.half == 1 else 0
        return (self.expert, first + row, column), (1, *shape)


def place_of(name: str, held: Container[str]) -> Place | None:
    """Return the location of a model tensor in a folder that contains the tensors `held`, or None
    if the folder lacks it."""
    if (found := _named(name, held)) is not None:
        return Place(found)
    if (parts := _EXPERT.fullmatch(name)) is None:
        return None
    half = _HALVES.get(parts["part"])
    stack = "down_proj" if half is None else "gate_up_proj"
    found = _named(f"{parts['experts']}.{stack}", held)
    return None if found is None else Place(found, int(parts["number"]), half)


def tower_part(name: str) -> str | None:
    """Return the module that contains a tensor, such as `model.visual`, if it is a vision tower or
    its projector; None for other tensors."""
    found = _TOWER.match(name)
    return None if found is None else found[0].removesuffix(".")


def _named(name: str, held: Container[str]) -> str | None:
    return next((other for other in _forms(name) if other in held), None)


def _forms(name: str) -> Iterator[str]:
    yield name
    yield f"language_model.{name}"
    if name.startswith("model."):
        yield f"model.language_model.{name.removeprefix('model.')}"
