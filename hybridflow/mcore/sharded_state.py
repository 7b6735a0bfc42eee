"""This rank's part of a checkpoint: rectangles of global tensors that are views of live memory,
built without copies or communication.

Model and reference are sharded as Megatron describes them. Each rank of the distributed optimizer
stores a flat range of each parameter. Such a range splits into a few rectangles of the parameter,
each contiguous in the flat shard, so every rank writes and reads exactly the elements it owns.
(Megatron's `fully_reshardable` format first gathers the whole optimizer state on every
data-parallel rank, distrib_optimizer.py:1430; its predecessor needs `flattened_range`, which
mapping.py:134 rejects. The keys and the global tensors are the same.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.errors import CheckpointError
from hybridflow.mcore.lora import Adapters
from hybridflow.mcore.model import by_chunk
from hybridflow.mcore.optimizer import is_precision_aware
from hybridflow.mcore.policy import Policy
from hybridflow.models.layout import boxes
from hybridflow.models.lora import is_adapter
from hybridflow.saving.rectangles import HfSlice

_REFERENCE = "reference."
_OPTIMIZER = "optimizer.state."


class ShardedState:
    """All checkpoint rectangles of one policy on this rank.

    `tensors` are views of live memory and include replicas; `hf` yields the locations of the
    model's HF tensors.
    """

    def __init__(self, policy: Policy, *, with_random_state: bool = True) -> None:
        policy.settle()
        self.policy = policy
        self.contains = ["model", *(["heads"] if policy.heads is not None else [])]
        self._copies: list[tuple[Any, torch.Tensor, Mapping[str, torch.Tensor]]] = []
        self._shards = _model_shards(policy)
        if policy.adapters:
            self._shards |= _adapter_shards(policy.adapters)
            self.contains.append("adapters")
        self.tensors: list[ShardedTensor] = list(chain.from_iterable(self._shards.values()))
        if policy.optimizer is not None:
            self.contains.append("optimizer")
            for inner in policy.inner_optimizers():
                self.tensors += self._optimizer_shards(inner)
        if policy.has_reference:
            self.contains.append("reference")
            self.tensors += _reference_shards(policy, self._shards)
        if with_random_state:
            self.contains.append("rng")
            self.random_state = torch.get_rng_state()
            place = (0, dist.get_rank(), dist.get_world_size())
            self.tensors.append(
                ShardedTensor.from_rank_offsets(
                    "rng_state", self.random_state, place, prepend_axis_num=1
                )
            )

    def _optimizer_shards(self, inner: Any) -> list[ShardedTensor]:
        of_parameter = {shards[0].data.data_ptr(): shards for shards in self._shards.values()}
        found: list[ShardedTensor] = []
        for parameter, low, high, tensors in _states(inner):
            if is_precision_aware(inner):
                self._copies.append((inner, parameter, tensors))
            for shard in of_parameter[parameter.data_ptr()]:
                start = _flat_start(shard, parameter)
                for name, flat in tensors.items():
                    found += _cut(
                        name,
                        flat,
                        (low, high),
                        shard,
                        start,
                        isinstance(inner, DistributedOptimizer),
                    )
        return found

    def put_back(self) -> None:
        """Write loaded values back to an optimizer that stores its state in lower precision. For
        such an optimizer, `tensors` contains only float32 copies of the state.
        """
        for inner, parameter, tensors in self._copies:
            inner._set_main_param_and_optimizer_states(parameter, tensors)

    def owned(self) -> list[ShardedTensor]:
        """Return the rectangles that this rank writes.

        For each replicated rectangle, only the main replica is written.
        """
        return [tensor for tensor in self.tensors if is_main_replica(tensor.replica_id)]

    def hf(self) -> Iterator[HfSlice]:
        """Yield the location in the checkpoint of each HF region of this rank's model weights.

        Replicated regions are yielded only by the main replica. Adapters are listed under their
        PEFT names, including those that share an A.
        """
        if self.policy.adapters:
            yield from _adapter_slices(self.policy.adapters, self._shards)
        for name, (parameter, local) in self.policy.described.items():
            for shard in self._shards[name]:
                if not is_main_replica(shard.replica_id):
                    continue
                row, rows = _rows_of(shard, parameter)
                lead = shard.prepend_axis_num
                for piece in local.pieces:
                    low = max(piece.local_start[0], row)
                    high = min(piece.local_start[0] + piece.shape[0], row + rows)
                    if low < high:
                        local_start = (low - row, *piece.local_start[1:])
                        starts = []
                        for base, start in zip(
                            shard.global_offset[lead:], local_start, strict=True
                        ):
                            starts.append(base + start)
                        inside = tuple(starts)
                        yield HfSlice(
                            piece.source,
                            (
                                piece.source_start[0] + low - piece.local_start[0],
                                *piece.source_start[1:],
                            ),
                            (high - low, *piece.shape[1:]),
                            shard.key,
                            (*shard.global_offset[:lead], *inside),
                        )


# ---- model and reference


def _model_shards(policy: Policy) -> dict[str, list[ShardedTensor]]:
    """Return the rectangles of each local parameter, keyed by name.

    A fused gate and up projection has two. Transformer Engine's `_extra_state` objects are skipped:
    they contain FP8 scales, and FP8 is not used in training.
    """
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    shards: dict[str, list[ShardedTensor]] = {}
    for prefix, stage in by_chunk(policy.stages, policy.heads):
        for name, entry in stage.sharded_state_dict(metadata=metadata).items():
            built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
            found = [part for part in nested_values([built]) if isinstance(part, ShardedTensor)]
            if found and not is_adapter(name):
                shards[prefix + name] = [
                    replace(shard, data=shard.data.detach()) for shard in found
                ]
    missing = sorted(policy.described.keys() - shards.keys())
    if missing:
        raise CheckpointError(
            f"Megatron returned no shards for {missing[:4]}; a checkpoint would lack them"
        )
    return shards


def _adapter_shards(adapters: Adapters) -> dict[str, list[ShardedTensor]]:
    """Return the rectangles of each local adapter parameter, keyed by name (one for each HF linear
    whose rows of B it contains). Their global tensors use PEFT's names.

    Megatron has no description of these parameters and would treat each as replicated across the
    tensor-parallel ranks.
    """
    shapes = adapters.map.tensors()
    copies = adapters.copies()
    shards: dict[str, list[ShardedTensor]] = {}
    for name, (parameter, local) in adapters.parameters().items():
        shards[name] = [
            ShardedTensor(
                key=piece.source,
                data=parameter.detach()[piece.slices()],
                dtype=parameter.dtype,
                local_shape=piece.shape,
                global_shape=shapes[piece.source],
                global_offset=piece.source_start,
                axis_fragmentations=None,
                replica_id=(0, *copies[name]),
            )
            for piece in sorted(local.pieces, key=lambda piece: piece.local_start)
        ]
    return shards


def _adapter_slices(
    adapters: Adapters, shards: Mapping[str, list[ShardedTensor]]
) -> Iterator[HfSlice]:
    sharing: dict[str, list[str]] = {}
    for alias, kept in adapters.map.aliases().items():
        sharing.setdefault(kept, []).append(alias)
    for name in adapters.parameters():
        for shard in shards[name]:
            if is_main_replica(shard.replica_id):
                for hf in (shard.key, *sharing.get(shard.key, ())):
                    yield HfSlice(
                        hf, shard.global_offset, shard.local_shape, shard.key, shard.global_offset
                    )


def _reference_shards(
    policy: Policy, shards: Mapping[str, list[ShardedTensor]]
) -> list[ShardedTensor]:
    """Return the rectangles of the reference's tensors. They match the model's rectangles, but have
    separate keys.
    """
    parameters = policy.weights()
    found = []
    for name, held in policy.reference_state().items():
        for shard in shards[name]:
            start = _flat_start(shard, parameters[name])
            data = held.reshape(-1)[start : start + shard.data.numel()].view(shard.local_shape)
            found.append(replace(shard, key=_REFERENCE + shard.key, data=data))
    return found


def _flat_start(shard: ShardedTensor, parameter: torch.Tensor) -> int:
    """Return the offset of a shard's elements in its parameter. Both must be contiguous."""
    if not shard.data.is_contiguous():
        raise CheckpointError(f"the shard {shard.key} is not contiguous in its parameter")
    return int(shard.data.storage_offset() - parameter.storage_offset())


def _rows_of(shard: ShardedTensor, parameter: torch.Tensor) -> tuple[int, int]:
    """Return (first row, number of rows) of the shard within the parameter."""
    return _flat_start(shard, parameter) // max(1, prod(parameter.shape[1:])), shard.local_shape[0]


# ---- optimizer


def _cut(
    name: str,
    flat: torch.Tensor,
    held: tuple[int, int],
    shard: ShardedTensor,
    start: int,
    owned_once: bool,
) -> Iterator[ShardedTensor]:
    """Yield the rectangles of `shard`'s global tensor that are covered by this rank's elements of
    the parameter.

    Args:
        name: kind of optimizer state.
        flat: this rank's elements, flattened.
        held: (start, end) of these elements in the parameter.
        shard: a shard of the parameter.
        start: offset of the shard in the parameter.
        owned_once: True if each element is on a single data-parallel rank.
    """
    lead = shard.prepend_axis_num
    end = start + shard.data.numel()
    low = max(held[0], start)
    high = min(held[1], end)
    position = low - held[0]
    # the distributed optimizer stores each element on one data-parallel rank, so replicas among the
    # weights are not replicas here
    replica = (*shard.replica_id[:-1], 0) if owned_once else shard.replica_id
    for offset, size in boxes(shard.local_shape, low - start, high - start):
        starts = []
        for base, step in zip(shard.global_offset[lead:], offset, strict=True):
            starts.append(base + step)
        inside = tuple(starts)
        data = flat[position : position + prod(size)].view((1,) * lead + size)
        position += data.numel()
        yield ShardedTensor(
            key=f"{_OPTIMIZER}{name}.{shard.key}",
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=shard.global_shape,
            global_offset=(*shard.global_offset[:lead], *inside),
            axis_fragmentations=None,
            replica_id=replica,
            allow_shape_mismatch=shard.allow_shape_mismatch,
        )


def _states(inner: Any) -> Iterator[tuple[torch.Tensor, int, int, dict[str, torch.Tensor]]]:
    """Yield (parameter, start and end of this rank's elements, {name of state: flat tensor}).
    States are exp_avg, exp_avg_sq and, below fp32, param.
    """
    if isinstance(inner, DistributedOptimizer):
        for parameter in inner.model_param_gbuf_map:
            held = inner._get_model_param_range_map(parameter)["param"]
            state = inner._get_main_param_and_optimizer_states(parameter)
            yield parameter, held.start, held.end, _flat(parameter, state)
        return
    main_of = _main_parameters(inner)
    for group in inner.optimizer.param_groups:
        for main in group["params"]:
            parameter = main_of.get(main, main)
            yield (
                parameter,
                0,
                parameter.numel(),
                _flat(parameter, {"param": main, **inner.optimizer.state[main]}),
            )


def _main_parameters(inner: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Return {fp32 copy: 16-bit parameter} if the optimizer keeps such copies."""
    pairs = zip(
        getattr(inner, "fp32_from_float16_groups", ()),
        getattr(inner, "float16_groups", ()),
        strict=True,
    )
    models_of: dict[torch.Tensor, torch.Tensor] = {}
    for mains, models in pairs:
        models_of.update(zip(mains, models, strict=True))
    return models_of


def _flat(parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # an fp32 model's main parameters are the model's own memory, which is already in the checkpoint
    names = (
        ("exp_avg", "exp_avg_sq")
        if parameter.dtype is torch.float32
        else ("param", "exp_avg", "exp_avg_sq")
    )
    return {name: tensors[name].detach().view(-1) for name in names}
