"""A worker that returns what it is given."""

from __future__ import annotations

from hybridflow.batch import DataProto
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register


class Echo:
    """Every rank is a data-parallel rank."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def mesh_position(self) -> MeshPosition:
        """The data-parallel rank is the rank."""
        return MeshPosition(self.context.rank, self.context.world_size, True)

    @register(Dispatch.DP, writes=("response_ids",))
    def echo(self, batch: DataProto) -> DataProto:
        """The batch."""
        return batch
