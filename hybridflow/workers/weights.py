"""The trainer's side of a weight sync: each pipeline stage's leader assembles whole tensors and broadcasts them to all engines.

This is the interface the slice plan will fill: `offer` (what, where), `join` (connect), `send` (one sync).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybridflow.config.schema import RunConfig
from hybridflow.engines.weights_group import Bucket, WeightsGroup, flatten
from hybridflow.mcore.parallel import all_coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.platform import Platform
from hybridflow.reshard import plan as reshard_plan
from hybridflow.reshard.gather import gather_stage
from hybridflow.workers.weights_offer import WeightsOffer

_BUCKET_BYTES = 64 << 20


class WeightSender:
    """Keeps the plan and the group of this rank's stage between syncs."""

    def __init__(self, policy: Policy, config: RunConfig, host: str) -> None:
        """`host`: address that engines reach this process by."""
        self.policy, self.host = policy, host
        self.timeout_s, self.backend = config.rollout.sync_timeout_s, Platform.detect().collective_backend
        self._plan: reshard_plan.StagePlan | None = None
        self._group: WeightsGroup | None = None

    def offer(self, engine_ranks: int) -> WeightsOffer | None:
        """Plan this stage and, on its leader, open a group of 1 + `engine_ranks`. Collective. An open group is closed first."""
        self.close()
        ranks, me = all_coordinates(), dist.get_rank()
        plans = reshard_plan.plan_stages(self.policy.family, ranks, _BUCKET_BYTES, self.policy.dtype.itemsize)
        self._plan = next((plan for plan in plans if plan.stage == ranks[me].pp_rank), None)
        if self._plan is None or self._plan.leader != me:
            return None
        name = f"stage{self._plan.stage}"
        self._group = WeightsGroup(name, 1 + engine_ranks, self.backend, self.host, self.timeout_s)
        host, port = self._group.endpoint
        buckets = tuple(self._bucket(bucket) for bucket in self._plan.buckets)
        return WeightsOffer(self._plan.stage, name, host, port, 1 + engine_ranks, self.backend, buckets)

    def join(self) -> None:
        """On a leader: wait for the engines."""
        if self._group is not None:
            self._group.join()

    def send(self) -> int:
        """One sync. Collective over the stage."""
        if self._plan is None:
            return 0
        sent, parameters = 0, self.policy.parameters()
        for bucket, tensors in zip(self._plan.buckets, gather_stage(self._plan, parameters, self.policy.dtype), strict=True):
            if self._group is not None:
                sent += self._group.send_flattened([flatten(self._bucket(bucket), tensors)])
        return sent

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _bucket(self, bucket: reshard_plan.Bucket) -> Bucket:
        dtype: torch.dtype = self.policy.dtype
        return Bucket(
            names=tuple(name for name, _ in bucket.tensors),
            dtypes=(str(dtype).removeprefix("torch."),) * len(bucket.tensors),
            shapes=tuple(shape for _, shape in bucket.tensors),
            num_bytes=bucket.numel * dtype.itemsize,
        )
