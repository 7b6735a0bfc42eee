"""Startup and shutdown of a job's additional policies (`roles`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hybridflow.batch import DataProto
from hybridflow.observe.progress import Progress
from hybridflow.rollout.protocols import Engines
from hybridflow.single_controller import Cluster, InProcessGroup, WorkerGroup, block_on
from hybridflow.trainer.generation import Generation
from hybridflow.trainer.groups import PolicyGroup
from hybridflow.trainer.job import Job
from hybridflow.trainer.own_policies import Learner


class FurtherPolicies:
    """A job's additional policies. Create this object after the cluster has started.

    Attributes:
        jobs: a view of the job for each policy.
        learners: the policies, once started.
        groups: {name: ranks in separate processes}.
    """

    def __init__(self, job: Job, cluster: Cluster | None) -> None:
        self.jobs = [job.of_policy(name) for name in job.config.roles]
        self.learners: list[Learner] = []
        self.groups: dict[str, WorkerGroup] = {}
        self._cluster = cluster
        self._engines: list[Generation] = []

    @property
    def guests(self) -> list[Job]:
        """Policies whose ranks run in the first policy's processes."""
        return [job for job in self.jobs if self._cluster is None or job.base]

    def start(
        self, shared: WorkerGroup | InProcessGroup, keep: Callable[[DataProto], DataProto]
    ) -> None:
        """Start engines and ranks. `shared` is the first policy's group; `keep` is
        `Learner.keep`."""
        for job in self.jobs:
            engines = job.start_engines(self._cluster)
            self._engines.append(engines)
            is_guest = job in self.guests
            group = shared if is_guest else job.start_policy(self._cluster)
            address = job.name if is_guest else "actor"
            answering = engines.connect(group, job.tokenizer, job.logs, address)
            job.stack.callback(partial(_close, answering))
            folder = job.model_folder / "taken"
            policy = PolicyGroup(group, job.config, address)
            self.learners.append(
                Learner(
                    *(job.name, job.config, policy, answering, job.tokenizer, keep, folder),
                    frozen=job.frozen,
                    base=job.base,
                )
            )
            if isinstance(group, WorkerGroup) and not is_guest:
                self.groups[job.name] = group

    async def wait_ready(self, progress: Progress) -> None:
        """Wait for the policies' engines, then plan and verify the weight transfers."""
        for engines in self._engines:
            await engines.wait_ready(progress)

    def stop(self) -> None:
        """Stop the policies' engines."""
        for engines in self._engines:
            block_on(engines.stop())


def _close(engines: Engines) -> None:
    block_on(engines.close())
