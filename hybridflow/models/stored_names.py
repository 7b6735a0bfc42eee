"""The names under which a checkpoint folder stores the tensors of a model.

Most folders use the same tensor names as the family. In a folder with a vision tower, the text
model's names have a prefix: `language_model.` if the tower was added to a complete text model
(Gemma 3, Mistral 3), or `model.language_model.` (Qwen3.5, and models in memory in transformers 5).
A layer's experts may be stacked in two tensors, `gate_up_proj` [experts, 2 ffn, hidden] with the
gate's rows first, and `down_proj` [experts, hidden, ffn] (Qwen3.5). In published folders of
Qwen3-VL, the matrices of each expert are transposed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
        is_transposed: whether the expert's matrix is stored transposed.
    """

    tensor: str
    expert: int | None = None
    half: int | None = None
    is_transposed: bool = False

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the model tensor, given the shape `stored` of the tensor in the
        folder."""
        if self.expert is None:
            return tuple(stored)
        rows, columns = self._turned(stored[1:])
        return (rows if self.half is None else rows // 2, columns)

    def stored_shape(self, shape: Sequence[int], experts: int) -> tuple[int, ...]:
        """Return the shape of the folder's tensor, given that of the model's. Inverse of `shape`.

        Args:
            experts: number of experts that a tensor stacks.
        """
        if self.expert is None:
            return tuple(shape)
        rows, columns = shape
        return experts, *self._turned((rows if self.half is None else 2 * rows, columns))

    def region(
        self, start: Sequence[int], shape: Sequence[int], stored: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Convert a region of the model tensor to (start, shape) in the stored tensor, whose shape
        is `stored`."""
        if self.expert is None:
            return tuple(start), tuple(shape)
        row, column = start
        rows, _ = self._turned(stored[1:])
        first = rows // 2 if self.half == 1 else 0
        return (self.expert, *self._turned((first + row, column))), (1, *self._turned(shape))

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of a `region` of the folder's tensor that has the shape of the region of
        the model's tensor."""
        if self.expert is None:
            return values
        return values[0].t() if self.is_transposed else values[0]

    def view(self, whole: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a view of a region of the model's tensor in the folder's tensor `whole`."""
        first, size = self.region(start, shape, whole.shape)
        region = tuple(slice(low, low + many) for low, many in zip(first, size, strict=True))
        return self.matrix(whole[region])

    def _turned(self, pair: Sequence[int]) -> tuple[int, int]:
        rows, columns = pair
        return (columns, rows) if self.is_transposed else (rows, columns)


def place_of(name: str, held: Container[str]) -> Place | None:
    """Return the location of a model tensor in a folder that contains the tensors `held`, or None
    if the folder lacks it."""
    if (found := _named(name, held)) is not None:
        return Place(found)
    if (stacked := stacked_place(name)) is None:
        return None
    found = _named(stacked.tensor, held)
    return None if found is None else replace(stacked, tensor=found)


def stacked_place(name: str) -> Place | None:
    """Return the place of a tensor of the model where the experts of a layer are stacked; None if
    it is not an expert's."""
    if (parts := _EXPERT.fullmatch(name)) is None:
        return None
    half = _HALVES.get(parts["part"])
    stack = "down_proj" if half is None else "gate_up_proj"
    return Place(f"{parts['experts']}.{stack}", int(parts["number"]), half)


def tower_part(name: str) -> str | None:
    """Return the module that contains a tensor, such as `model.visual`, if it is a vision tower or
    its projector; None for other tensors."""
    found = _TOWER.match(name)
    return None if found is None else found[0].removesuffix(".")


def multimodal_name(name: str) -> str:
    """Return the name that a tensor of a text model has in transformers' class with the vision
    tower."""
    inner = name.removeprefix("model.")
    return f"model.language_model.{inner}" if inner != name else name


def _named(name: str, held: Container[str]) -> str | None:
    return next((other for other in _forms(name) if other in held), None)


def _forms(name: str) -> Iterator[str]:
    yield name
    yield f"language_model.{name}"
    yield multimodal_name(name)
