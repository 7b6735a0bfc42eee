"""Worker classes for the sides of `dispatch`. They return their arguments."""

from __future__ import annotations

import os
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.bench.measurements import store
from hybridflow.dispatch import Dispatch, register

SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"
COLUMNS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "responses",
    "response_mask",
    "labels",
    "old_log_probs",
    "advantages",
)


class Plain:
    """A bare Ray actor, which represents the machine's limit."""

    def echo(self, value: object) -> object:
        """Return the value."""
        return value

    def nothing(self) -> None:
        """Do nothing."""


class Echo(store.Echo):
    """A worker of this project. Every rank is a data-parallel rank."""

    @register(Dispatch.DP, writes=COLUMNS)
    def echo(self, batch: DataProto) -> DataProto:
        """Return the batch."""
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Do nothing."""


def peer_group(ranks: int) -> Any:
    """Start verl's worker group with echo workers and no GPUs."""
    import ray
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch as PeerDispatch
    from verl.single_controller.base.decorator import register as peer_register
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
    )

    class PeerEcho(Worker):
        @peer_register(dispatch_mode=PeerDispatch.ONE_TO_ALL)
        def serialize_with(self, method: str) -> None:
            os.environ[SERIALIZATION] = method

        @peer_register(dispatch_mode=PeerDispatch.DP_COMPUTE_PROTO)
        def echo(self, batch):  # type: ignore[no-untyped-def]
            return batch

        @peer_register(dispatch_mode=PeerDispatch.ONE_TO_ALL)
        def nothing(self) -> None:
            pass

    prefix = f"peer{ranks}"
    pool = RayResourcePool(
        [ranks], use_gpu=False, max_colocate_count=1, name_prefix=prefix
    )
    workers = RayClassWithInitArgs(ray.remote(PeerEcho))
    return RayWorkerGroup(pool, workers, device_name="cpu")
