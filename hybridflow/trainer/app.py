"""The composition root: builds the groups, services and trainers of a job from a checked configuration, and ends all
of them with the job."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config import check_sampling, derived
from hybridflow.config.registry import absolute_entry
from hybridflow.config.schema import ModelConfig, RunConfig
from hybridflow.data.custom import open_training
from hybridflow.data.dataset import PreferenceDataset, SftDataset
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.device.platform import Platform
from hybridflow.errors import (
    CheckpointError,
    ClusterLostError,
    ConfigError,
    EngineError,
    RunInterrupted,
    StorageError,
    WeightSyncError,
    WorkerError,
)
from hybridflow.observe.environment import package_versions
from hybridflow.observe.logfile import setup_logging, stop_logging
from hybridflow.observe.progress import Progress
from hybridflow.observe.report import write_report
from hybridflow.placement import pools_of
from hybridflow.placement.threads import threads_by_role, user_limit
from hybridflow.planning.deadlines import StartAllowance
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.process.stopping import terminate_as_interrupt
from hybridflow.process.surroundings import without_proxy
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.dumps import Dumps, identity
from hybridflow.rollout.evaluation import Scorer, Validator, check_truths, open_val_sets, sources_to_score
from hybridflow.saving.fingerprint import Fingerprint
from hybridflow.saving.store import Checkpoint, CheckpointStore
from hybridflow.single_controller import (
    Cluster,
    InProcessGroup,
    ResourcePool,
    WorkerGroup,
    block_on,
    colocated,
    keep_in_store,
    reserve,
)
from hybridflow.trainer import assets, planned
from hybridflow.trainer.check_devices import check_devices
from hybridflow.trainer.folder import exclusive, make_output_dir, make_room
from hybridflow.trainer.generation import EngineHere, EngineProcesses, Generation, NoEngines, start_both
from hybridflow.trainer.groups import FrozenGroup, ModelGroup, PolicyGroup, check_steps, tell_backend
from hybridflow.trainer.layout import layout_text
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.preload import Preload
from hybridflow.trainer.recovery import fit_with_restarts
from hybridflow.trainer.session import Session
from hybridflow.trainer.supervised import RewardTrainer, SftTrainer, pair_accuracy
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.role import RoleSpec, RoleWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker

_ENGINE_WORKERS = (RolloutWorker, RolloutNodeWorker)
_log = logging.getLogger(__name__)


def train(config: RunConfig, preload: Preload | None = None) -> None:
    """The main job: warm start when configured, reinforcement learning, checkpoint, export, report."""
    if config.cluster.address is None:  # the devices of a cluster to be joined are asked once it is there
        check_devices(config, Platform.detect().kind)
    _run_job(config, preload, _train, derived.total_steps(config, None))


def sft(config: RunConfig, preload: Preload | None = None) -> None:
    """Supervised fine-tuning alone: `config.sft`, checkpoint, export."""
    if config.sft.steps < 1:
        raise ConfigError("sft.steps is 0: nothing to do; set sft.steps and sft.train_files")
    _run_job(config, preload, _sft, config.sft.steps)


def train_reward(config: RunConfig, preload: Preload | None = None) -> None:
    """A reward model from preference pairs: warm start when configured, `config.reward_training`, checkpoint,
    export."""
    if config.reward_training.steps < 1:
        raise ConfigError(
            "reward_training.steps is 0: nothing to do; set reward_training.steps and reward_training.train_files"
        )
    _run_job(config, preload, _train_reward, config.reward_training.steps)


# ---- the jobs


class _Job:
    """The parts that all jobs share: session, data, tokenizer, and the start of worker groups."""

    def __init__(
        self,
        config: RunConfig,
        preload: Preload | None,
        session: Session,
        stack: ExitStack,
        progress: Progress,
        goes_on: bool = False,
    ) -> None:
        """`goes_on`: this session has trained already, and goes back to its last checkpoint."""
        self.config, self.preload, self.session, self.stack, self.progress = config, preload, session, stack, progress
        cores = Platform.detect().cores if config.cluster.address is None else 1
        self.threads = threads_by_role(config, cores, user_limit())
        self.checkpoint = session.store.latest() if goes_on or config.trainer.resume == "auto" else None
        with progress.stage("prepare data"):
            message = assets.prepare_data(config)
        if message:
            progress.message(message)
        self.tokenizer: Tokenizer = assets.open_tokenizer(config)
        if not goes_on:
            changes = session.know(
                Fingerprint.of(config, self.tokenizer.digests(), package_versions()), self.checkpoint
            )
            for line in (*changes, *session.store.left_out(), *session.lost_records(self.checkpoint)):
                progress.message(line)
        (session.go_back if goes_on else session.resume)(self.checkpoint)
        if self.checkpoint is not None:
            progress.message(f"resuming from {self.checkpoint.folder}")
        self.hf_config = assets.resolve_hf_config(config, self.tokenizer)
        self.config = StartAllowance.of(config, self.hf_config).applied(config)

    def start_cluster(self, job: str = "train") -> Cluster | None:
        """Start Ray, or join the configured cluster, and reserve the devices of the whole job; None where it has one
        process."""
        if self.config.cluster.in_process:
            return None
        with self.progress.stage("start Ray"):
            cluster = self.stack.enter_context(Cluster.start(self.config.cluster, self.session.folder))
            kind = cluster.device_kind()
            if job == "train":
                check_devices(self.config, kind)
            placement, self.pools = reserve(cluster, pools_of(self.config, job, kind), kind)
        _log.info(placement.describe())
        return cluster

    def start_roles(
        self, cluster: Cluster | None, roles: Sequence[str], trained: Sequence[str]
    ) -> dict[str, WorkerGroup | InProcessGroup]:
        """The ranks of each of `roles`: those that live in the policy's processes (which are `actor`'s, the first
        role's) share a group, the others have one each. Only `trained` ones may update their weights."""
        specs = {role: self._role_spec(role, role in trained) for role in roles}
        shared = [role for role in roles if derived.is_colocated(self.config, role)]
        groups: dict[str, WorkerGroup | InProcessGroup] = {}
        if shared:
            groups |= dict.fromkeys(shared, self._start_shared(cluster, [specs[role] for role in shared]))
            tell_backend(groups[shared[0]], self.config, self.session.folder, self.progress.message)
        own = [role for role in roles if role not in shared]
        return groups | {role: self._start_own(cluster, specs[role]) for role in own if cluster is not None}

    def _start_shared(self, cluster: Cluster | None, specs: Sequence[RoleSpec]) -> WorkerGroup | InProcessGroup:
        config = self.config
        procs, backend = derived.world_size(config), config.actor.backend
        worker: type = PolicyWorker
        args: Sequence[Any] = specs
        if len(specs) > 1:
            worker = colocated(actor=PolicyWorker, **dict.fromkeys([spec.role for spec in specs[1:]], ModelWorker))
            args = [(spec,) for spec in specs]
        if cluster is None:
            with self.progress.stage(f"build the model in this process ({backend})"):
                group = InProcessGroup(worker, role="actor", args=args, log_dir=self.session.folder / "logs")
                self.stack.callback(group.close)
                return group
        with self.progress.stage(f"start {procs} {backend} ranks ({layout_text(config)})"):
            return self._group(cluster, self.pools["actor"], worker, "actor", args)

    def _start_own(self, cluster: Cluster, spec: RoleSpec) -> WorkerGroup:
        procs = derived.role_world_size(self.config, spec.role)
        with self.progress.stage(f"start {procs} Megatron ranks of the {spec.role.replace('_', ' ')}"):
            return self._group(cluster, self.pools[spec.role], ModelWorker, spec.role, (spec,))

    def _role_spec(self, role: str, trains: bool) -> RoleSpec:
        path = self.config.model.path if role == "actor" else getattr(self.config, role).path
        is_policy = role == "actor" or path is None
        hf_config = self.hf_config if is_policy else dict(derived.hf_config(ModelConfig(path=path)))
        actor = replace(self.config.actor, policy_loss=absolute_entry(self.config.actor.policy_loss))
        model = self.config.model
        if model.family is not None:
            model = replace(model, family=absolute_entry(model.family))
        config = replace(self.config, actor=actor, model=model)
        return RoleSpec(config, role, hf_config, path, self.tokenizer.path.resolve(), trains)

    def start_engines(self, cluster: Cluster | None) -> Generation:
        """The engines, which go on starting in the background where they have processes of their own."""
        if not derived.generates(self.config):
            return NoEngines()
        target, dtype, fp8 = self.session.folder / "model", self.config.model.dtype, self.config.rollout.quantization
        folder = assets.write_engine_folder(target, self.hf_config, dtype, self.tokenizer, fp8)
        if cluster is None:
            return EngineHere(self.config, folder.resolve(), self.session.folder / "logs", self.tokenizer.stop_ids)
        told = self.session.note_restart("engine_restarts", self.progress.message, "engines start again: ")
        workers, others = self._start_engine_workers(cluster, folder)
        engines = EngineProcesses(workers, others, self.config, self.tokenizer.stop_ids, told)
        return engines.give_way(self.progress)

    def _start_engine_workers(self, cluster: Cluster, folder: Path) -> tuple[WorkerGroup, WorkerGroup | None]:
        """The workers on the engines' first nodes, and on their others if they have any."""
        config, dtype = self.config.rollout, self.config.model.dtype
        with self.progress.stage(f"start {config.num_engines} engine workers"):
            routes = derived.needs_engine_routes(self.config)
            threads, fork_server = self.threads["rollout"], self._fork_server("engines")
            tokenizes = any(one.stop for one in check_sampling.sampled(self.config).values())
            args = (config, folder.resolve(), dtype, self.config.seed, routes, threads, fork_server, tokenizes)
            if config.nodes_per_engine == 1:
                return self._group(cluster, self.pools["rollout"], RolloutWorker, "rollout", args), None
            first, others = _first_nodes(self.pools["rollout"], config.nodes_per_engine)
            leading = self._group(cluster, first, RolloutWorker, "rollout", args)
            following = self._group(cluster, others, RolloutNodeWorker, "rollout-node", args)

            async def follow() -> None:
                await following.call(RolloutNodeWorker.follow, await leading.call(RolloutWorker.node_store))

            block_on(follow())
            leading.on_restart(follow)
            return leading, following

    def _group(self, cluster: Cluster, pool: ResourcePool, worker: type, role: str, args: Sequence[Any]) -> WorkerGroup:
        serves = worker in _ENGINE_WORKERS  # the engine has processes of its own
        env, logs = {"OMP_NUM_THREADS": str(1 if serves else self.threads[role])}, self.session.folder / "logs"
        server = self._fork_server("torch" if serves else "ranks")
        group = WorkerGroup(cluster, pool, worker, role=role, args=args, env=env, log_dir=logs, fork_server=server)
        self.stack.callback(group.kill)
        return group

    def _fork_server(self, loaded: str) -> str:
        return self.preload.name(loaded) if self.preload else ""

    async def warm_start(
        self, policy: PolicyGroup, check: Callable[[], Awaitable[None]] | None = None
    ) -> SftTrainer | None:
        """Run the supervised phase. None where it is not configured or a checkpoint of a later phase exists."""
        config, checkpoint = self.config, self.checkpoint
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


def _train(job: _Job) -> dict[str, Any]:
    config, session = job.config, job.session
    rewards = job.stack.enter_context(RewardManager(config.reward, session.folder / "logs" / "rewards.log"))
    dataset = open_training(job.tokenizer, config.data)
    held_out = open_val_sets(config, job.tokenizer) if derived.generates(config) else {}
    rewards.check_data_sources(sources_to_score(config, dataset, *held_out.values()))
    check_truths(rewards, config, dataset, *held_out.values())
    check_steps(config)
    made_with, dumps = identity(job.hf_config, job.tokenizer), None
    if config.trainer.rollouts_from is not None:
        rows = config.data.train_batch_size * config.rollout.n
        dumps = Dumps(Path(config.trainer.rollouts_from), made_with, rows, derived.needs_support(config))
        dumps.check(job.checkpoint.step if job.checkpoint is not None and job.checkpoint.phase == "rl" else 0)
    cluster = job.start_cluster()
    trained = ("actor", "critic")
    roles = derived.roles_in_use(config)
    engines, workers = start_both(
        lambda: job.start_engines(cluster),
        lambda: job.start_roles(cluster, roles, trained),
        at_once=cluster is not None and not derived.alternates(config),
    )
    policy = PolicyGroup(workers["actor"], config)
    block_on(job.warm_start(policy, engines.check_starting))

    scorer = Scorer(rewards, job.tokenizer)
    validator = Validator(config, held_out, scorer, session.folder)
    rollouts, weights = engines.connect(workers["actor"], job.tokenizer, session.folder / "logs")
    job.stack.callback(lambda: block_on(rollouts.close()))
    told = session.note_restart("restarts", job.progress.message)
    apart = {role: group for role, group in workers.items() if isinstance(group, WorkerGroup)}
    others = {
        role: ModelGroup(workers[role], role, config)
        if role in trained or derived.is_colocated(config, role)
        else FrozenGroup(apart[role], role, config, told)
        for role in roles[1:]
    }
    keep = keep_in_store if cluster is not None else lambda batch: batch
    parts = (policy, rollouts, weights, dataset, scorer, validator, others, keep, made_with, dumps)
    trainer = RLTrainer(config, session, *parts)
    if "reference" in apart:
        apart["reference"].on_restart(trainer.fill_reference)
    training = {role: apart[role] for role in roles if role in trained and role in apart}
    groups = {role: group for role, group in training.items() if role == "actor" or group is not training["actor"]}

    async def learn() -> str | None:
        if job.checkpoint is not None and job.checkpoint.phase == "rl":
            await trainer.resume(job.checkpoint)
        else:
            await trainer.start_from_present_weights()
            if config.sft.steps:
                await trainer.save()  # a run that is killed from here on does not repeat the warm start
        await trainer.phases.make_room()
        await engines.wait_ready(job.progress)
        await fit_with_restarts(trainer, groups, config.trainer.max_restarts, job.progress)
        folder = await _finish(job, policy)
        await engines.stop()
        return folder

    exported = block_on(learn())
    totals, steps = session.totals, max(trainer.step, 1)
    return {
        "score_before": totals.get("score_before"),
        "score_after": totals.get("score_after"),
        "seconds_sft": totals.get("seconds_sft", 0.0),
        "seconds_grpo": totals.get("seconds_grpo", 0.0),
        "logprob_diff_mean": totals.get("logprob_diff_sum", 0.0) / steps,
        "logprob_diff_max": totals.get("logprob_diff_max", 0.0),
        "first_ppo_kl_max": totals.get("first_ppo_kl_max"),
        "steps": trainer.step,
        **{name: int(totals.get(name, 0)) for name in ("restarts", "engine_restarts")},
        "exported_to": exported,
        "planned": block_on(planned.compare(config, job.hf_config, session, {"actor": policy, **others})),
    }


def _sft(job: _Job) -> dict[str, Any]:
    cluster = job.start_cluster("sft")
    policy = PolicyGroup(job.start_roles(cluster, ["actor"], ["actor"])["actor"], job.config)
    trainer = block_on(job.warm_start(policy))
    if trainer is None:
        raise ConfigError(
            f"{job.session.folder} already holds a reinforcement-learning run; give this one another name"
        )
    with job.progress.stage("save the checkpoint"):
        block_on(trainer.save())
    exported = block_on(_finish(job, policy))
    return {"seconds_sft": job.session.totals.get("seconds_sft", 0.0), "steps": trainer.step, "exported_to": exported}


def _train_reward(job: _Job) -> dict[str, Any]:
    config, settings = job.config, job.config.reward_training
    names = (settings.chosen_key, settings.rejected_key)
    dataset = PreferenceDataset(settings.train_files, job.tokenizer, config.data, *names)
    held_out = PreferenceDataset(settings.val_files, job.tokenizer, config.data, *names) if settings.val_files else None
    roles = derived.roles_in_use(config, "train-reward")
    workers = job.start_roles(job.start_cluster("train-reward"), roles, roles)
    model = ModelGroup(workers["reward_model"], "reward_model", config)
    trainer = RewardTrainer(settings, job.session, model, dataset, config.seed)

    async def learn() -> dict[str, float]:
        if job.checkpoint is not None and job.checkpoint.phase == "reward":
            await trainer.resume(job.checkpoint)
        else:
            if config.sft.steps:
                policy = PolicyGroup(workers["actor"], config)
                await job.warm_start(policy)
                folder = job.session.folder / "model" / "reward-start"
                await policy.call(PolicyWorker.export, folder)
                await model.call(ModelWorker.fill, folder)
            await model.call(ModelWorker.set_optimizer, settings.optim)
        await trainer.fit()
        return await pair_accuracy(model, held_out) if held_out else {}

    found = block_on(learn())
    for name, value in found.items():
        job.progress.message(f"held-out pairs: {name} {value:.3f}")
    return {
        "seconds_sft": job.session.totals.get("seconds_sft", 0.0),
        "seconds_reward": job.session.totals.get("seconds_reward", 0.0),
        **{f"held_out_{name}": value for name, value in found.items()},
        "steps": trainer.step,
        "exported_to": block_on(_finish(job, model)),
    }


async def _finish(job: _Job, trained: ModelGroup) -> str | None:
    """Wait for the last checkpoint and write the export; returns the export's folder."""
    with job.progress.stage("wait for the last checkpoint"):
        await job.session.store.wait()
    if not job.config.trainer.export or job.config.trainer.rollout_only:
        return None
    folder = job.session.folder / "export"
    with job.progress.stage("export to a Hugging Face folder"):
        lines = (await trained.call(RoleWorker.export, folder))[0]
    for line in lines or ():
        job.progress.message(line)
    return str(folder)


# ---- around a job


def _run_job(
    config: RunConfig, preload: Preload | None, job: Callable[[_Job], dict[str, Any]], total_steps: int | None
) -> None:
    """Open the run folder, run the job, write summary and report; on an interrupt, say how to resume."""
    os.environ.update(without_proxy(os.environ))  # rewards, tools and episodes ask this machine's addresses as well
    folder = make_output_dir(config)
    with Progress(0, "") as progress, exclusive(folder, progress.message):
        make_room(config, folder, total_steps, progress)
        folder.mkdir(parents=True, exist_ok=True)
        setup_logging(folder)
        session = Session(config)
        try:
            with terminate_as_interrupt(), _stop_when_asked(session):
                summary = _with_clusters(config, preload, job, session, progress)
            session.check_folder()
            session.close()
        except KeyboardInterrupt as interrupt:
            raise RunInterrupted(_how_to_resume(session.store)) from interrupt
        except CheckpointError:
            session.check_folder()  # it says better why nothing could be written
            raise
        except (OSError, StorageError) as error:
            session.check_folder()
            where = "" if getattr(error, "filename", None) else f"a file of {folder}"
            storage = StorageError.of(error, where) if isinstance(error, OSError) else error
            if storage is None:
                raise
            raise StorageError(f"{storage}; {_how_to_resume(session.store)}") from error
        except (WorkerError, EngineError, WeightSyncError) as error:
            error.args = (f"{error}\n{_how_to_resume(session.store)}",)
            raise
        finally:
            with suppress(OSError):  # what could not be written is said already
                session.close()
            stop_logging()
        summary = {
            "seed": config.seed,
            "layout": layout_text(config),
            **summary,
            "seconds_total": session.totals_now()["seconds_total"],
        }
        session.write_json("summary.json", summary)
        if config.trainer.report:
            progress.message(f"report: {write_report(folder)}")
        progress.message(f"summary: {folder / 'summary.json'}")


def _with_clusters(
    config: RunConfig,
    preload: Preload | None,
    job: Callable[[_Job], dict[str, Any]],
    session: Session,
    progress: Progress,
) -> dict[str, Any]:
    """Run the job; where Ray itself is lost and the run had started it, go on from the last checkpoint in a fresh
    cluster, at most `trainer.max_restarts` times within an hour.

    Raises:
        ClusterLostError: otherwise; says how to resume.
    """
    limit, goes_on = RestartLimit(config.trainer.max_restarts), False
    while True:
        try:
            with ExitStack() as stack:
                return job(_Job(config, preload, session, stack, progress, goes_on))
        except ClusterLostError as error:
            if _interrupted(error):  # a signal to all processes of the run has ended Ray as well
                raise KeyboardInterrupt from error
            session.store.settle()
            if config.cluster.address is not None or not limit.take():
                raise ClusterLostError(f"{error}, and the run with it: {_how_to_resume(session.store)}") from error
            progress.message(f"{error}: a fresh cluster is started, and the run goes on from its last checkpoint")
            goes_on = True


def _interrupted(error: BaseException | None) -> bool:
    """Whether the error was raised while an interrupt was on its way out."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _interrupted(error.__context__))


@contextmanager
def _stop_when_asked(session: Session) -> Iterator[None]:
    """Treat SIGUSR1, which a job's script sends before Slurm takes the nodes, as a request: the run ends after the
    present step and a checkpoint."""

    def ask(number: int, frame: Any) -> None:
        session.stop_asked = True

    before = signal.signal(signal.SIGUSR1, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _how_to_resume(store: CheckpointStore) -> str:
    latest: Checkpoint | None = store.latest()
    if latest is None:
        return "stopped; there is no checkpoint yet, so the same command starts from the beginning"
    return f"stopped; the same command resumes from {latest.folder}"


def _first_nodes(engines: ResourcePool, nodes: int) -> tuple[ResourcePool, ResourcePool]:
    """The slots of the engines' first nodes, and of their others."""
    slots = engines.split([1] * len(engines))
    return ResourcePool.merge(slots[::nodes]), ResourcePool.merge([s for n, s in enumerate(slots) if n % nodes])
