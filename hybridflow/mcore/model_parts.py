"""A policy's tensors grouped by part (weights, gradients, optimizer state, reference), for
`Residency`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hybridflow.device.residency import Part
from hybridflow.mcore.model import by_chunk
from hybridflow.mcore.policy import Policy


def model_parts(policy: Policy) -> Mapping[Part, Callable[[], Iterable[Tensor]]]:
    """Return, for each part, a function that lists its current tensors.

    The list changes when the optimizer is replaced or a reference is added.
    """
    return {
        "weights": lambda: [*_held(policy), *_flat(policy, "param_data")],
        "gradients": lambda: [*_flat(policy, "grad_data"), *_gradients(policy)],
        "optimizer": lambda: [*_main_parameters(policy), *_states(policy)],
        "reference": lambda: policy.reference_state().values() if policy.has_reference else (),
    }


def _held(policy: Policy) -> list[Tensor]:
    """Return the parameters and buffers of every model chunk. If the policy shares the weights of
    its base, return only the adapters: the base lists the shared weights."""
    if policy.base is not None and policy.adapters is not None:
        return [factor for factor, _ in policy.adapters.parameters().values()]
    held: list[Tensor] = []
    for _, stage in by_chunk(policy.stages, policy.heads):
        held.extend((*stage.parameters(), *stage.buffers()))
    return held


def _flat(policy: Policy, name: str) -> list[Tensor]:
    """Return Megatron's flat buffers. Without the distributed optimizer they contain no
    parameters."""
    chunks = [*policy.chunks] if policy.trains else []
    if policy.head_training:
        chunks.append(policy.head_training.chunk)
    flat: list[Tensor] = []
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            data = getattr(buffer, name)
            if data is not None:
                flat.append(data)
    return flat


def _main_parameters(policy: Policy) -> list[Tensor]:
    """Return the parameters that the inner optimizers update: fp32 copies or, when training in
    fp32, views of the weights."""
    inner = policy.inner_optimizers()
    parameters: list[Tensor] = []
    for one in inner:
        for group in one.optimizer.param_groups:
            parameters.extend(group["params"])
    return parameters


def _gradients(policy: Policy) -> list[Tensor]:
    """Return the gradients of parameters and main parameters that are not views of the flat
    buffers."""
    owners = (*_held(policy), *_main_parameters(policy))
    return [owner.grad for owner in owners if owner.grad is not None]


def _states(policy: Policy) -> list[Tensor]:
    inner = policy.inner_optimizers()
    values: list[Tensor] = []
    for one in inner:
        for state in one.optimizer.state.values():
            values += [value for value in state.values() if isinstance(value, Tensor)]
    return values
