"""The worker for all nodes of a multi-node engine except the first. The first node runs
`RolloutWorker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridflow.config.schema import RolloutConfig
from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.engines.nodes import OtherNode
from hybridflow.workers.rollout import engine_spec, placed


class RolloutNodeWorker:
    """Owns an engine's server on one node. Rank r belongs to engine r // (nodes - 1), where it is
    node r % (nodes - 1) + 1.
    """

    def __init__(self, context: WorkerContext, config: RolloutConfig, *engine: Any) -> None:
        """Takes the same arguments as `RolloutWorker`. Starts no server until `follow` is
        called."""
        self._kind = config.engine
        self.engine, node = divmod(context.rank, config.nodes_per_engine - 1)
        spec = engine_spec(config, self.engine, *engine)
        self._spec = replace(placed(spec, config, context), node_rank=node + 1)
        self._log_path = context.log_path.with_name(f"{self._spec.name}.node{node + 1}.log")
        self._node: OtherNode | None = None

    @register(Dispatch.ONE_TO_ALL)
    def follow(self, first_nodes: Sequence[tuple[str, int]]) -> None:
        """Start and stop this node's server whenever the engine's first node requests it.
        `first_nodes` lists the store address of every engine (`node_store`).
        """
        self.stop()
        self._node = OtherNode(self._kind, self._spec, self._log_path, *first_nodes[self.engine])

    @register(Dispatch.ONE_TO_ALL)
    def is_following(self) -> bool:
        """Return True if `follow` was called. Also used as a liveness check of this worker."""
        return self._node is not None

    @register(Dispatch.ONE_TO_ALL)
    def stop(self) -> None:
        """Stop the server and all its processes."""
        if self._node is not None:
            self._node.stop()
        self._node = None
