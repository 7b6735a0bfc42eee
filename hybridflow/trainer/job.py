"""Parts common to all jobs: session, data, tokenizer, and the start of worker groups and
engines."""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config import check_sampling, derived
from hybridflow.config.registry import absolute_entry
from hybridflow.config.schema import ModelConfig, RunConfig
from hybridflow.data.dataset import SftDataset
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.device.platform import Platform
from hybridflow.observe.environment import package_versions
from hybridflow.observe.progress import Progress
from hybridflow.placement import policy_pool, pools_of
from hybridflow.placement.threads import threads_by_role, user_limit
from hybridflow.planning.deadlines import StartAllowance
from hybridflow.saving.fingerprint import Fingerprint
from hybridflow.single_controller import (
    Cluster,
    InProcessGroup,
    ResourcePool,
    WorkerGroup,
    block_on,
    colocated,
    reserve,
)
from hybridflow.trainer import assets
from hybridflow.trainer.check_devices import check_devices
from hybridflow.trainer.generation import EngineHere, EngineProcesses, Generation, NoEngines
from hybridflow.trainer.groups import PolicyGroup, tell_backend
from hybridflow.trainer.layout import layout_text
from hybridflow.trainer.preload import Preload
from hybridflow.trainer.session import Session
from hybridflow.trainer.supervised import SftTrainer
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.role import RoleSpec
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker

_ENGINE_WORKERS = (RolloutWorker, RolloutNodeWorker)
_log = logging.getLogger(__name__)


class Job:
    """Parts common to all jobs: session, data, tokenizer, and the start of worker groups."""

    def __init__(
        self,
        config: RunConfig,
        preload: Preload | None,
        session: Session,
        stack: ExitStack,
        progress: Progress,
        goes_on: bool = False,
    ) -> None:
        """`goes_on`: True if this session has already trained and now resumes from its last
        checkpoint.
        """
        self.config = self._given = config
        self.name = ""  # of an additional policy
        self.frozen = False
        self.base: str | None = None  # see `PolicyConfig.base`
        self.logs = session.folder / "logs"
        self.model_folder = session.folder / "model"
        self.preload = preload
        self.session = session
        self.stack = stack
        self.progress = progress
        self.threads = _threads(config)
        self.checkpoint = None
        if goes_on or config.trainer.resume == "auto":
            self.checkpoint = session.store.latest()
        with progress.stage("prepare data"):
            message = assets.prepare_data(config)
        if message:
            progress.message(message)
        self.tokenizer: Tokenizer = assets.open_tokenizer(config)
        self.hf_config = assets.resolve_hf_config(config, self.tokenizer)
        if not goes_on:
            inputs = Fingerprint.of(config, self.tokenizer.digests(), package_versions())
            changes = session.know(inputs, self.checkpoint, self.hf_config)
            left_out = session.store.left_out()
            lost = session.lost_records(self.checkpoint)
            for line in (*changes, *left_out, *lost):
                progress.message(line)
        if goes_on:
            session.go_back(self.checkpoint)
        else:
            session.resume(self.checkpoint)
        if self.checkpoint is not None:
            progress.message(f"resuming from {self.checkpoint.folder}")
        self.config = StartAllowance.of(config, self.hf_config).applied(config)

    def of_policy(self, name: str) -> Job:
        """Return a view of this job for the additional policy `roles.NAME`, with that policy's
        model, tokenizer, devices and folders. Call it after the cluster has started.
        """
        own = copy.copy(self)
        own.name = name
        policy = self.config.roles[name]
        own.frozen = policy.frozen
        own.base = policy.base
        config = derived.policy_view(self._given, name)
        own.logs = self.logs / name
        own.logs.mkdir(parents=True, exist_ok=True)
        own.model_folder = self.model_folder / name
        own.threads = _threads(config)
        own.tokenizer = assets.open_tokenizer(config)
        own.hf_config = assets.resolve_hf_config(config, own.tokenizer)
        own.config = StartAllowance.of(config, own.hf_config).applied(config)
        if not config.cluster.in_process:
            own.pools = {
                "actor": self.pools["actor" if own.base else name],
                "rollout": self.pools[policy_pool(name, "rollout")],
            }
        return own

    def start_cluster(self, job: str = "train") -> Cluster | None:
        """Start Ray or join the configured cluster, and reserve all of the job's devices. Returns
        None for a single-process job."""
        if self.config.cluster.in_process:
            return None
        with self.progress.stage("start Ray"):
            cluster = self.stack.enter_context(
                Cluster.start(self.config.cluster, self.session.folder)
            )
            kind = cluster.device_kind()
            if job == "train":
                check_devices(self.config, kind)
            placement, self.pools = reserve(cluster, pools_of(self.config, job, kind), kind)
        _log.info(placement.describe())
        return cluster

    def start_roles(
        self,
        cluster: Cluster | None,
        roles: Sequence[str],
        trained: Sequence[str],
        guests: Sequence[Job] = (),
    ) -> dict[str, WorkerGroup | InProcessGroup]:
        """Start the ranks of `roles` and return {role: group}. Roles in the policy's processes
        (those of the first role, `actor`) share a group; each of the others has its own group. Only
        `trained` roles may update their weights. `guests` are additional policies in the policy's
        processes.
        """
        specs = {role: self._role_spec(role, role in trained) for role in roles}
        shared = [role for role in roles if derived.is_colocated(self.config, role)]
        groups: dict[str, WorkerGroup | InProcessGroup] = {}
        if shared:
            policy = self._start_shared(cluster, [specs[role] for role in shared], guests)
            tell_backend(policy, self.config, self.session.folder, self.progress.message)
            groups |= dict.fromkeys(shared, policy)
        if cluster is not None:
            for role in roles:
                if role not in shared:
                    groups[role] = self._start_own(cluster, specs[role])
        return groups

    def start_policy(self, cluster: Cluster | None) -> WorkerGroup | InProcessGroup:
        """Start the ranks of an additional policy in separate processes."""
        return self._start_shared(cluster, [self._role_spec("actor", not self.frozen)])

    def _start_shared(
        self, cluster: Cluster | None, specs: Sequence[RoleSpec], guests: Sequence[Job] = ()
    ) -> WorkerGroup | InProcessGroup:
        config = self.config
        procs = derived.world_size(config)
        backend = config.actor.backend
        worker: type = PolicyWorker
        args: Sequence[Any] = specs
        if len(specs) > 1 or guests:
            worker = colocated(
                actor=PolicyWorker,
                **dict.fromkeys([spec.role for spec in specs[1:]], ModelWorker),
                **dict.fromkeys([guest.name for guest in guests], PolicyWorker),
            )
            policies = [guest._role_spec("actor", not guest.frozen) for guest in guests]
            args = [(spec,) for spec in (*specs, *policies)]
        if cluster is None:
            with self.progress.stage(f"build the model in this process ({backend})"):
                group = InProcessGroup(worker, role="actor", args=args, log_dir=self.logs)
                self.stack.callback(group.close)
                return group
        whose = f" of the {self.name}" if self.name else ""
        with self.progress.stage(f"start {procs} {backend} ranks{whose} ({layout_text(config)})"):
            return self._group(cluster, self.pools["actor"], worker, "actor", args)

    def _start_own(self, cluster: Cluster, spec: RoleSpec) -> WorkerGroup:
        procs = derived.role_world_size(self.config, spec.role)
        title = spec.role.replace("_", " ")
        with self.progress.stage(f"start {procs} Megatron ranks of the {title}"):
            return self._group(cluster, self.pools[spec.role], ModelWorker, spec.role, (spec,))

    def _role_spec(self, role: str, trains: bool) -> RoleSpec:
        path = self.config.model.path if role == "actor" else getattr(self.config, role).path
        is_policy = role == "actor" or path is None
        hf_config = self.hf_config
        if not is_policy:
            hf_config = dict(derived.run_hf_config(self.config, ModelConfig(path=path)))
        actor = self.config.actor
        actor = replace(actor, policy_loss=absolute_entry(actor.policy_loss))
        model = self.config.model
        if model.family is not None:
            model = replace(model, family=absolute_entry(model.family))
        config = replace(self.config, actor=actor, model=model)
        base = "actor" if role == "actor" and self.base else None
        tokenizer = self.tokenizer.path.resolve()
        return RoleSpec(config, role, hf_config, path, tokenizer, trains, base)

    def start_engines(self, cluster: Cluster | None) -> Generation:
        """Start the engines. Engines in separate processes keep starting up in the background."""
        if not derived.generates(self.config):
            return NoEngines()
        target = self.model_folder
        dtype = self.config.model.dtype
        fp8 = self.config.rollout.quantization
        folder = assets.write_engine_folder(target, self.hf_config, dtype, self.tokenizer, fp8)
        if cluster is None:
            return EngineHere(self.config, folder.resolve(), self.logs, self.tokenizer.stop_ids)
        told = self.session.note_restart(
            "engine_restarts", self.progress.message, "restarting engines: "
        )
        workers, others = self._start_engine_workers(cluster, folder)
        engines = EngineProcesses(workers, others, self.config, self.tokenizer.stop_ids, told)
        return engines.give_way(self.progress)

    def _start_engine_workers(
        self, cluster: Cluster, folder: Path
    ) -> tuple[WorkerGroup, WorkerGroup | None]:
        """Start the engine workers on each engine's first node and, if engines span several nodes,
        on the other nodes.
        """
        config = self.config.rollout
        dtype = self.config.model.dtype
        whose = f" of the {self.name}" if self.name else ""
        with self.progress.stage(f"start {config.num_engines} engine workers{whose}"):
            routes = derived.needs_engine_routes(self.config)
            threads = self.threads["rollout"]
            fork_server = self._fork_server("engines")
            sampling = check_sampling.sampled(self.config).values()
            tokenizes = any(one.stop for one in sampling)
            args = (
                config,
                folder.resolve(),
                dtype,
                self.config.seed,
                routes,
                threads,
                fork_server,
                tokenizes,
            )
            pool = self.pools["rollout"]
            if config.nodes_per_engine == 1:
                return self._group(cluster, pool, RolloutWorker, "rollout", args), None
            first, others = _first_nodes(pool, config.nodes_per_engine)
            leading = self._group(cluster, first, RolloutWorker, "rollout", args)
            following = self._group(cluster, others, RolloutNodeWorker, "rollout-node", args)

            async def follow() -> None:
                store = await leading.call(RolloutWorker.node_store)
                await following.call(RolloutNodeWorker.follow, store)

            block_on(follow())
            leading.on_restart(follow)
            return leading, following

    def _group(
        self, cluster: Cluster, pool: ResourcePool, worker: type, role: str, args: Sequence[Any]
    ) -> WorkerGroup:
        serves = worker in _ENGINE_WORKERS  # the engine has separate processes
        env = {"OMP_NUM_THREADS": str(1 if serves else self.threads[role])}
        logs = self.logs
        label = policy_pool(self.name, role) if self.name else role
        server = self._fork_server("torch" if serves else "ranks")
        group = WorkerGroup(
            cluster, pool, worker, role=label, args=args, env=env, log_dir=logs, fork_server=server
        )
        self.stack.callback(group.kill)
        return group

    def _fork_server(self, loaded: str) -> str:
        return self.preload.name(loaded) if self.preload else ""

    async def warm_start(
        self, policy: PolicyGroup, check: Callable[[], Awaitable[None]] | None = None
    ) -> SftTrainer | None:
        """Run the supervised phase and return its trainer. Returns None if the phase is not
        configured, or if a checkpoint of a later phase exists.
        """
        config = self.config
        checkpoint = self.checkpoint
        if config.sft.steps < 1 or (checkpoint is not None and checkpoint.phase != "sft"):
            return None
        dataset = SftDataset(config.sft.train_files, self.tokenizer, config.data, config.sft)
        trainer = SftTrainer(config.sft, self.session, policy, dataset, config.seed)
        if checkpoint is not None:
            await trainer.resume(checkpoint)
        else:
            await policy.call(PolicyWorker.set_optimizer, config.sft.optim)
        await trainer.fit(check)
        return trainer


def _first_nodes(engines: ResourcePool, nodes: int) -> tuple[ResourcePool, ResourcePool]:
    """Return the slots on each engine's first node, and those on the other nodes."""
    slots = engines.split([1] * len(engines))
    others = [slot for number, slot in enumerate(slots) if number % nodes]
    return ResourcePool.merge(slots[::nodes]), ResourcePool.merge(others)


def _threads(config: RunConfig) -> dict[str, int]:
    """Return the number of threads for each role's ranks."""
    cores = Platform.detect().cores if config.cluster.address is None else 1
    return threads_by_role(config, cores, user_limit())
