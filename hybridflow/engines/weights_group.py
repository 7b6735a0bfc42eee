"""Sender's side of a weights group: one trainer rank broadcasts to tensor-parallel ranks of engines. Imports torch, never sglang.

The engines join through `EngineClient.init_weights_group`, where SGLang calls `init_custom_process_group`
(sglang/srt/utils/common.py:2859). This side builds the same group by hand instead of calling that code: a bare process group has no
part in `torch.distributed`'s global state, so it may live beside Megatron's groups, and several may exist in one process.

Order of calls, for every group in turn:
    sender: `group = WeightsGroup(...)`; `group.endpoint`            driver: (gets the endpoint)
    sender: `group.join()`                                           driver: `init_weights_group` on all engines at once
    sender: `group.send(tensors)`                                    driver: for each bucket in order, `receive_weights` on all engines
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from hybridflow.errors import WeightSyncError
from hybridflow.rendezvous import master_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL

BUCKET_BYTES = 256 << 20
# torch puts a group under the first device of its backend (torch/distributed/distributed_c10d.py, _new_process_group_helper).
DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries, in order of its bytes. Plain data, for the way from the sender to the driver."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int


def plan_buckets(tensors: Mapping[str, torch.Tensor], max_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut named tensors into buckets of at most `max_bytes`; a larger tensor is a bucket of its own.

    Only names, dtypes and shapes are looked at, so the plan holds for every later set of the same weights (meta tensors will do).
    Wider dtypes come first in a bucket: SGLang wants each tensor at a multiple of its item size
    (sglang/srt/weight_sync/tensor_bucket.py, FlattenedTensorBucket.empty).
    """
    groups: list[list[tuple[str, torch.Tensor]]] = []
    room = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append((name, tensor))
        room -= tensor.nbytes
    return [_bucket(sorted(group, key=lambda item: -item[1].element_size())) for group in groups]


def _bucket(items: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in items),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in items),
        shapes=tuple(tuple(tensor.shape) for _, tensor in items),
        num_bytes=sum(tensor.nbytes for _, tensor in items),
    )


def flatten(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a bucket, one after the other, as SGLang's `flattened_bucket` expects them: uint8 `[num_bytes]`.

    Raises:
        WeightSyncError: a tensor is missing or no longer what was planned.
    """
    parts = []
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        tensor = tensors.get(name)
        if tensor is None:
            raise WeightSyncError(f"{name} was planned but is not among the tensors to send")
        if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
            raise WeightSyncError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, planned was {dtype} {shape}")
        parts.append(tensor.detach().contiguous().flatten().view(torch.uint8))
    return torch.cat(parts)


class WeightsGroup:
    """Rank 0 of one weights group.

    Args:
        name: the group's name, unique among the groups of an engine.
        world_size: 1 + the tensor-parallel processes of all engines.
        backend: gloo (tensors on the CPU) | nccl (tensors on a CUDA device).
        host: address this process listens on and the engines connect to.
        timeout_s: deadline of joining and of each broadcast.
    """

    def __init__(self, name: str, world_size: int, backend: str = "gloo", host: str = "127.0.0.1", timeout_s: float = 120.0) -> None:
        if backend not in DEVICE_OF_BACKEND:
            raise WeightSyncError(f"backend {backend!r} of weights group {name}: use one of {', '.join(DEVICE_OF_BACKEND)}")
        self.name, self.world_size, self.backend, self.host = name, world_size, backend, host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroupGloo | ProcessGroupNCCL | None = None
        self._store: distributed.TCPStore | None = master_store(host, 0, timeout_s)
        self.endpoint: tuple[str, int] = (host, self._store.port)

    def join(self) -> None:
        """Wait until all engines have joined.

        Raises:
            WeightSyncError: not within the timeout.
        """
        if self._store is None:
            raise WeightSyncError(f"weights group {self.name} is closed")
        # The prefixes are those of init_custom_process_group, then twice those of torch's _new_process_group_helper.
        store: distributed.Store = distributed.PrefixStore(self.name, self._store)
        store = distributed.PrefixStore(f"{self.name}/", store)
        store = distributed.PrefixStore(f"{DEVICE_OF_BACKEND[self.backend]}/", store)
        try:
            self._group = self._build(store)
        except RuntimeError as error:  # torch's DistError and its children
            raise WeightSyncError(f"weights group {self.name}: not all of {self.world_size - 1} engine ranks joined: {error}") from error

    def _build(self, store: distributed.Store) -> ProcessGroupGloo | ProcessGroupNCCL:
        if self.backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return distributed.ProcessGroupNCCL(store, 0, self.world_size, options)
        gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = self._timeout
        gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=self.host)]
        return distributed.ProcessGroupGloo(store, 0, self.world_size, gloo)

    def send(self, tensors: Mapping[str, torch.Tensor], buckets: Sequence[Bucket] | None = None) -> int:
        """Broadcast the tensors, bucket by bucket; each waits until the engines have been told to receive it.

        Args:
            tensors: by the names of a saved checkpoint (MoE: one tensor per expert).
            buckets: the plan the driver knows; None: `plan_buckets(tensors)`.

        Returns:
            Bytes sent to each engine rank.

        Raises:
            WeightSyncError: not joined, an engine is gone, or it took longer than the timeout. The group is of no more use then:
                `close` it, make a new one, and send everything again.
        """
        plan = plan_buckets(tensors) if buckets is None else buckets
        return self.send_flattened(flatten(bucket, tensors) for bucket in plan)

    def send_flattened(self, buffers: Iterable[torch.Tensor]) -> int:
        """Broadcast ready-made uint8 buffers, in order. Returns and raises as `send`."""
        return sum(self._broadcast(buffer) for buffer in buffers)

    def _broadcast(self, buffer: torch.Tensor) -> int:
        if self._group is None:
            raise WeightSyncError(f"weights group {self.name} has not been joined")
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        try:
            self._group.broadcast([buffer], options).wait()  # type: ignore[union-attr]
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)  # wait() only orders streams; the caller may reuse the buffer
        except RuntimeError as error:
            raise WeightSyncError(f"weights group {self.name}: broadcast of {buffer.nbytes} bytes failed: {error}") from error
        return buffer.nbytes

    def close(self) -> None:
        """Leave the group and stop listening. Safe to call again."""
        if self._group is not None:
            self._group.abort()  # does not wait for peers that may be gone
        self._group = None
        self._store = None

    def __enter__(self) -> WeightsGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
