"""Worker classes of both sides: they return what they are given."""

from __future__ import annotations

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from support.batches import COLUMNS


class Echo:
    """Ours: every rank is a data-parallel rank."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def mesh_position(self) -> MeshPosition:
        """Data-parallel rank = rank."""
        return MeshPosition(self.context.rank, self.context.world_size, True)

    @register(Dispatch.DP, writes=COLUMNS)
    def echo(self, batch: DataProto) -> DataProto:
        """The batch."""
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def zeros(self, nbytes: int) -> np.ndarray:
        """As many bytes, which this process writes into the store."""
        return np.zeros(nbytes, np.uint8)


def plain_actor() -> type:
    """A bare Ray actor: the machine's limit."""

    class Plain:
        def echo(self, value: object) -> object:
            return value

        def nothing(self) -> None:
            pass

        def zeros(self, nbytes: int) -> object:
            return np.zeros(nbytes, np.uint8)

    return Plain


def peer_worker() -> type:
    """verl's worker. A function, so that verl is imported where it is installed."""
    import os

    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch as PeerDispatch
    from verl.single_controller.base.decorator import register as peer_register

    class PeerEcho(Worker):
        @peer_register(dispatch_mode=PeerDispatch.ONE_TO_ALL)
        def serialize_with(self, method: str) -> None:
            os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = method

        @peer_register(dispatch_mode=PeerDispatch.DP_COMPUTE_PROTO)
        def echo(self, batch):  # type: ignore[no-untyped-def]
            return batch

        @peer_register(dispatch_mode=PeerDispatch.ONE_TO_ALL)
        def nothing(self) -> None:
            pass

        def zeros(self, nbytes: int) -> object:
            return np.zeros(nbytes, np.uint8)

    return PeerEcho
