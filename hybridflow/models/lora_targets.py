"""The weights that low-rank adapters can be added to, and the names by which `actor.lora.targets`
selects them. Does not import torch, so that the planner can use it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybridflow.models.family import Family
from hybridflow.models.layout import Coordinates, LocalTensor
from hybridflow.models.vision import MODULE

# Megatron's weights of linears: `linear_fc1.weight`, or `experts.linear_fc1.weight3` of an expert
_WEIGHT = re.compile(r"(?P<module>(?:.+\.)?(?P<linear>linear_\w+))\.weight(?P<expert>\d*)")


def targets_of(family: Family) -> tuple[str, ...]:
    """Return the names that `actor.lora.targets` may contain for this model, in the model's
    order."""
    linears = [local for local in family.local_tensors(Coordinates()) if is_linear(local)]
    return tuple(dict.fromkeys(map(target_of, linears)))


def is_adapted(local: LocalTensor, targets: Sequence[str]) -> bool:
    """Return True if this tensor is a weight with adapters. Without targets, these are the weights
    of all linears except routed experts."""
    if not is_linear(local):
        return False
    target = target_of(local)
    return target in targets if targets else not is_routed(target)


def is_linear(local: LocalTensor) -> bool:
    """Return True for the weight of a linear that supports adapters."""
    matched = _WEIGHT.fullmatch(local.name)
    if local.name.startswith(f"{MODULE}."):  # of a vision tower, which has linears of these names
        return False
    # a number belongs to an expert of a grouped linear, and only to one
    return matched is not None and (".experts." in f".{local.name}") == bool(matched["expert"])


def is_routed(target: str) -> bool:
    """Return True if this target denotes linears of routed experts."""
    return target.startswith("experts.")


def target_of(local: LocalTensor) -> str:
    """Return the name that selects this linear's weight."""
    matched = _matched(local)
    return f"experts.{matched['linear']}" if matched["expert"] else matched["linear"]


def module_of(local: LocalTensor) -> tuple[str, str]:
    """Return Megatron's name of the linear, and the index of the local expert to which the weight
    belongs ("" if it does not belong to an expert)."""
    matched = _matched(local)
    return matched["module"], matched["expert"]


def _matched(local: LocalTensor) -> re.Match[str]:
    matched = _WEIGHT.fullmatch(local.name)
    assert matched is not None
    return matched
