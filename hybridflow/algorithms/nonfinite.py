"""Detection of NaN or infinite losses and gradients.

All ranks agree on the result, which names the rank and micro-batch. For each micro-batch, the loss
and some gradients in the backward pass are checked. A value that becomes non-finite anywhere else
also shows up in those gradients. The flags stay on the device until the end of the mini-batch, so a
check costs one read and one small all-gather.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from hybridflow.errors import NonFiniteError

_PLACES = ("the loss", "a gradient", "the reduced gradients")  # each can cause the next


class Watch:
    """Checks one mini-batch on this rank for NaN and infinity."""

    def __init__(self, num_micro_batches: int, device: torch.device) -> None:
        # one row per place; the last place has no micro-batches
        self.flags = torch.zeros((2, num_micro_batches), dtype=torch.bool, device=device)

    def loss(self, micro_batch: int, total: torch.Tensor) -> None:
        """Check `total`, the loss of this micro-batch."""
        self._note(0, micro_batch, total)

    def gradient_of(self, tensor: torch.Tensor | None, micro_batch: int) -> None:
        """Check the gradient of `tensor` in the backward pass of this micro-batch."""
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda grad: self._note(1, micro_batch, grad))

    def _note(self, place: int, micro_batch: int, values: torch.Tensor) -> None:
        self.flags[place, micro_batch] |= not_finite(values)

    def report_of(self, gradients: Iterable[torch.Tensor]) -> str:
        """Return a description of the problem with this mini-batch, identical on all ranks; empty
        if there is none. Collective over the world.

        Args:
            gradients: this rank's reduced gradients.
        """
        reduced = torch.stack([not_finite(data) for data in gradients]).any()
        # the first micro-batch at each place; -1: none
        found = [torch.where(row.any(), row.int().argmax(), -1) for row in self.flags]
        mine = torch.stack([*found, torch.where(reduced, 0, -1)]).to(torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return describe(torch.stack(everyone).tolist())


def not_finite(values: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor that is True if any value is NaN or infinite, i.e. if the minimum or
    maximum is. This takes one pass over the values, whereas `isfinite` takes four and allocates a
    tensor of the same size in each.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return ~torch.stack(torch.aminmax(values)).isfinite().all()


def describe(found: Sequence[Sequence[int]]) -> str:
    """Describe where the first non-finite values occurred. `found` [world][3] contains, for each
    rank and each kind of check, the first micro-batch with a non-finite value, or -1.
    """
    for place, name in enumerate(_PLACES):
        ranks = [(rank, row[place]) for rank, row in enumerate(found) if row[place] >= 0]
        if not ranks:
            continue
        if place == len(_PLACES) - 1:
            return (
                f"{name} on rank {ranks[0][0]} are not finite, although the gradients of every "
                "micro-batch are: their sum overflowed"
            )
        shown = ", ".join(f"rank {rank} micro-batch {micro}" for rank, micro in ranks[:4])
        more = f" and {len(ranks) - 4} more ranks" if len(ranks) > 4 else ""
        return f"{name} is not finite: {shown}{more} (counted from 0)"
    return ""


def not_applied(
    problem: str,
    on_nonfinite: str,
    metrics: Mapping[str, tuple[float, float]],
    learning_rate: float,
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return the metrics of an update that was skipped because of this problem.

    Raises:
        NonFiniteError: `on_nonfinite` is stop.
    """
    if on_nonfinite == "stop":
        raise NonFiniteError(
            f"{problem}. The update was not applied. Lower the learning rate (actor.optim.lr, "
            "critic.optim.lr, sft.optim.lr) and rerun the same command to resume from the last "
            "checkpoint, or skip such updates with actor.on_nonfinite=skip"
        )
    logging.getLogger(__name__).warning("update skipped (actor.on_nonfinite=skip): %s", problem)
    finite = {name: pair for name, pair in metrics.items() if math.isfinite(pair[0])}
    return finite, {"grad_norm": math.nan, "lr": learning_rate, "applied": 0.0}
