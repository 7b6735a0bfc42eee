"""The composition root: builds a job's groups, services and trainers from a validated
configuration, and shuts them down with the job."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.data.custom import Prompts, open_training
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.device.platform import Platform
from hybridflow.errors import (
    CheckpointError,
    ClusterLostError,
    ConfigError,
    EngineError,
    FlowError,
    RunInterrupted,
    StorageError,
    WeightSyncError,
    WorkerError,
)
from hybridflow.observe.logfile import setup_logging, stop_logging
from hybridflow.observe.progress import Progress
from hybridflow.observe.report import write_report
from hybridflow.process.restart_limit import RestartLimit
from hybridflow.process.stopping import terminate_as_interrupt
from hybridflow.process.surroundings import without_proxy
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.dumps import Dumps, identity
from hybridflow.rollout.evaluation import (
    Scorer,
    Validator,
    check_numbers,
    check_truths,
    open_val_sets,
    sources_to_score,
)
from hybridflow.rollout.protocols import Engines
from hybridflow.rollout.recorded import RecordedPairs
from hybridflow.saving.model_card import write_card
from hybridflow.saving.store import Checkpoint, CheckpointStore
from hybridflow.single_controller import (
    WorkerGroup,
    block_on,
    keep_in_store,
)
from hybridflow.trainer import planned
from hybridflow.trainer.check_devices import check_devices
from hybridflow.trainer.flow_check import check_flow
from hybridflow.trainer.folder import exclusive, make_output_dir, make_room
from hybridflow.trainer.generation import start_both
from hybridflow.trainer.groups import FrozenGroup, ModelGroup, PolicyGroup, check_steps
from hybridflow.trainer.job import Job
from hybridflow.trainer.layout import layout_text
from hybridflow.trainer.loop import RLTrainer, check_trained_roles
from hybridflow.trainer.own_policies import Learner
from hybridflow.trainer.preload import Preload
from hybridflow.trainer.protocols import Role
from hybridflow.trainer.recovery import fit_with_restarts
from hybridflow.trainer.samples import Dumped, Sampled, Samples
from hybridflow.trainer.session import Session
from hybridflow.trainer.start_policies import FurtherPolicies
from hybridflow.trainer.stopping import Steps, Stops
from hybridflow.trainer.supervised import RewardTrainer, pair_accuracy
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker
from hybridflow.workers.role import RoleWorker

AnyJob = Callable[[Job, Stops], Steps[dict[str, Any]]]


def train(config: RunConfig, preload: Preload | None = None) -> None:
    """Run the main job: warm start (if configured), reinforcement learning, checkpoint, export and
    report."""
    _exhaust(training(config, preload, Stops()))


def training(config: RunConfig, preload: Preload | None, stops: Stops) -> Steps[None]:
    """Run `train` as a generator that yields at each stop."""
    # for an external cluster, devices are checked after joining it
    if config.cluster.address is None:
        check_devices(config, Platform.detect().kind)
    yield from _run_job(config, preload, _train, derived.total_steps(config, None), stops)


def sft(config: RunConfig, preload: Preload | None = None) -> None:
    """Run only supervised fine-tuning (`config.sft`), followed by checkpoint and export."""
    if config.sft.steps < 1:
        raise ConfigError("sft.steps is 0: nothing to do; set sft.steps and sft.train_files")
    job = _run_job(config, preload, _without_stops(_sft), config.sft.steps, Stops())
    _exhaust(job)


def train_reward(config: RunConfig, preload: Preload | None = None) -> None:
    """Train a reward model on preference pairs: warm start (if configured),
    `config.reward_training`, checkpoint and export."""
    if config.reward_training.steps < 1:
        raise ConfigError(
            "reward_training.steps is 0: nothing to do; set reward_training.steps and "
            "reward_training.train_files"
        )
    steps = config.reward_training.steps
    _exhaust(_run_job(config, preload, _without_stops(_train_reward), steps, Stops()))


# ---- the jobs


def _exhaust(steps: Steps[None]) -> None:
    for _ in steps:
        continue


def _without_stops(job: Callable[[Job], dict[str, Any]]) -> AnyJob:
    def stepped(given: Job, stops: Stops) -> Steps[dict[str, Any]]:
        yield from ()
        return job(given)

    return stepped


def _train(job: Job, stops: Stops) -> Steps[dict[str, Any]]:
    config = job.config
    session = job.session
    rewards = job.stack.enter_context(
        RewardManager(config.reward, session.folder / "logs" / "rewards.log")
    )
    dataset = open_training(job.tokenizer, config.data)
    held_out = open_val_sets(config, job.tokenizer) if derived.generates(config) else {}
    _check(job, rewards, dataset, held_out)
    made_with = identity(job.hf_config, job.tokenizer)
    dumps = _open_dumps(job, made_with)
    cluster = job.start_cluster()
    roles = derived.roles_in_use(config)
    trained = [name for name in roles if derived.trains(config, name)]
    further = FurtherPolicies(job, cluster)
    engines, workers = start_both(
        lambda: job.start_engines(cluster),
        lambda: job.start_roles(cluster, roles, trained, further.guests),
        at_once=cluster is not None and not derived.alternates(config),
    )
    policy = PolicyGroup(workers["actor"], config)
    block_on(job.warm_start(policy, engines.check_starting))

    scorer = Scorer(rewards, job.tokenizer)
    validator = Validator(config, held_out, scorer, session.folder)
    answering = engines.connect(workers["actor"], job.tokenizer, session.folder / "logs")
    job.stack.callback(lambda: block_on(answering.close()))
    told = session.note_restart("restarts", job.progress.message)
    apart = {role: group for role, group in workers.items() if isinstance(group, WorkerGroup)}
    others = {
        role: ModelGroup(workers[role], role, config)
        if role in trained or derived.is_colocated(config, role)
        else FrozenGroup(apart[role], role, config, told)
        for role in roles[1:]
    }
    keep = keep_in_store if cluster is not None else lambda batch: batch
    samples = _samples(job, dataset, dumps, answering, scorer, keep, made_with)
    further.start(workers["actor"], keep)
    trainer = RLTrainer(
        *(config, session, {"actor": policy, **others}, answering, samples, validator),
        further.learners,
    )
    trainer.records.performance.use_model(job.hf_config, Platform.detect().device_name())
    trainer.stop = stops.stop
    stops.job = job
    stops.trainer = trainer
    if "reference" in apart:
        apart["reference"].on_restart(trainer.fill_reference)
    groups = _groups_that_train(trained, apart) | further.groups

    async def learn() -> str | None:
        if job.checkpoint is not None and job.checkpoint.phase == "rl":
            await trainer.resume(job.checkpoint)
        else:
            await trainer.start_from_present_weights()
            if config.sft.steps:
                # a run that is killed after this point does not repeat the warm start
                await trainer.save()
        await trainer.phases.make_room()
        await engines.wait_ready(job.progress)
        await further.wait_ready(job.progress)
        await fit_with_restarts(trainer, groups, config.trainer.max_restarts, job.progress)
        return await _finish(job, policy, further.learners)

    exported = yield from stops.follow(learn())
    compared = block_on(
        planned.compare(config, job.hf_config, session, {"actor": policy, **others})
    )
    summary = {
        "flow": derived.flow_name(config),
        **_summary(session, trainer.step),
        "exported_to": exported,
        "planned": compared,
    }
    yield from stops.end(summary)
    block_on(engines.stop())
    further.stop()
    return summary


def _check(
    job: Job,
    rewards: RewardManager,
    dataset: Prompts | PreferenceDataset,
    held_out: Mapping[str, Prompts],
) -> None:
    """Check the user's data and code before anything starts."""
    rewards.check_data_sources(sources_to_score(job.config, dataset, *held_out.values()))
    check_truths(rewards, job.config, dataset, *held_out.values())
    check_numbers(rewards, job.config, dataset)
    check_steps(job.config)
    check_trained_roles(job.config, job.checkpoint)
    check_flow(job.config, job.progress.message)


def _groups_that_train(
    trained: Sequence[str], apart: Mapping[str, WorkerGroup]
) -> dict[str, WorkerGroup]:
    """Return {role: group} for roles that train, listing each group once."""
    training = {role: apart[role] for role in trained if role in apart}
    return {
        role: group
        for role, group in training.items()
        if role == "actor" or group is not training["actor"]
    }


def _samples(
    job: Job,
    dataset: Prompts | PreferenceDataset,
    dumps: Dumps | None,
    engines: Engines,
    scorer: Scorer,
    keep: Callable[[DataProto], DataProto],
    made_with: Mapping[str, Any],
) -> Samples:
    """Return the source of training samples: recorded pairs, dumps, or answers from engines."""
    config = job.config
    if isinstance(dataset, PreferenceDataset):
        return RecordedPairs(config, dataset, keep)
    given = (config, engines, dataset, scorer, job.session.timeline, keep, made_with)
    return Sampled(*given) if dumps is None else Dumped(dumps, *given)


def _summary(session: Session, steps: int) -> dict[str, Any]:
    """Return the training loop's entries for summary.json."""
    totals = session.totals
    return {
        "score_before": totals.get("score_before"),
        "score_after": totals.get("score_after"),
        "seconds_sft": totals.get("seconds_sft", 0.0),
        "seconds_grpo": totals.get("seconds_grpo", 0.0),
        "logprob_diff_mean": totals.get("logprob_diff_sum", 0.0) / max(steps, 1),
        "logprob_diff_max": totals.get("logprob_diff_max", 0.0),
        "first_ppo_kl_max": totals.get("first_ppo_kl_max"),
        "steps": steps,
        **{name: int(totals.get(name, 0)) for name in ("restarts", "engine_restarts")},
    }


def _open_dumps(job: Job, made_with: Mapping[str, Any]) -> Dumps | None:
    """Open the dumps on which the run trains; None if it generates its samples."""
    config = job.config
    checkpoint = job.checkpoint
    if config.trainer.rollouts_from is None:
        return None
    rows = config.data.train_batch_size * config.rollout.n
    dumps = Dumps(
        Path(config.trainer.rollouts_from), made_with, rows, derived.needs_support(config)
    )
    dumps.check(checkpoint.step if checkpoint is not None and checkpoint.phase == "rl" else 0)
    return dumps


def _sft(job: Job) -> dict[str, Any]:
    cluster = job.start_cluster("sft")
    policy = PolicyGroup(job.start_roles(cluster, ["actor"], ["actor"])["actor"], job.config)
    trainer = block_on(job.warm_start(policy))
    if trainer is None:
        raise ConfigError(
            f"{job.session.folder} already contains a reinforcement-learning run; choose another "
            "name for this one"
        )
    with job.progress.stage("save the checkpoint"):
        block_on(trainer.save())
    exported = block_on(_finish(job, policy))
    return {
        "seconds_sft": job.session.totals.get("seconds_sft", 0.0),
        "steps": trainer.step,
        "exported_to": exported,
    }


def _train_reward(job: Job) -> dict[str, Any]:
    config = job.config
    settings = job.config.reward_training
    names = (settings.chosen_key, settings.rejected_key)
    dataset = PreferenceDataset(settings.train_files, job.tokenizer, config.data, *names)
    held_out = (
        PreferenceDataset(settings.val_files, job.tokenizer, config.data, *names)
        if settings.val_files
        else None
    )
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


async def _finish(job: Job, trained: ModelGroup, learners: Sequence[Learner] = ()) -> str | None:
    """Wait for the last checkpoint, then export the trained model and any additional policies.
    Returns the trained model's export folder.
    """
    with job.progress.stage("wait for the last checkpoint"):
        await job.session.store.wait()
    for learner in learners:
        await _export(job, learner.policy, f"export-{learner.name}")
    return await _export(job, trained, "export")


async def _export(job: Job, trained: Role, name: str) -> str | None:
    """Export the model if the run is configured to do so. Returns the export's folder, or None."""
    if not job.config.trainer.export or job.config.trainer.rollout_only:
        return None
    folder = job.session.folder / name
    with job.progress.stage("export to a Hugging Face folder"):
        lines = (await trained.call(RoleWorker.export, folder))[0]
        write_card(folder, job.session.folder)
    for line in lines or ():
        job.progress.message(line)
    return str(folder)


# ---- around a job


def _run_job(
    config: RunConfig,
    preload: Preload | None,
    job: AnyJob,
    total_steps: int | None,
    stops: Stops,
) -> Steps[None]:
    """Open the run folder, run the job, and write summary and report. On an interrupt, report how
    to resume."""
    # rewards, tools and episodes also connect to addresses of this machine
    os.environ.update(without_proxy(os.environ))
    folder = make_output_dir(config)
    with Progress(0, "") as progress, exclusive(folder, progress.message), ExitStack() as last:
        make_room(config, folder, total_steps, progress)
        folder.mkdir(parents=True, exist_ok=True)
        setup_logging(folder)
        session = Session(config)
        last.callback(session.end_tracking, progress.message)
        stops.finish = partial(_report, session, progress)
        try:
            with terminate_as_interrupt(), _stop_when_asked(session):
                summary = yield from _with_clusters(config, preload, job, session, progress, stops)
            session.check_folder()
            session.close()
        except KeyboardInterrupt as interrupt:
            raise RunInterrupted(_how_to_resume(session.store)) from interrupt
        except CheckpointError:
            session.check_folder()  # its error explains better why nothing could be written
            raise
        except (OSError, StorageError) as error:
            session.check_folder()
            storage = _storage_error(error, folder)
            if storage is None:
                raise
            raise StorageError(f"{storage}; {_how_to_resume(session.store)}") from error
        except (WorkerError, EngineError, WeightSyncError, FlowError) as error:
            error.args = (f"{error}\n{_how_to_resume(session.store)}",)
            raise
        finally:
            with suppress(OSError):  # write errors have been reported already
                session.close()
            stop_logging()
        if stops.summary is None:
            stops.finish(summary)


def _storage_error(error: OSError | StorageError, folder: Path) -> StorageError | None:
    """Return the error as a StorageError that names the affected file; None if it is not a storage
    error.
    """
    if not isinstance(error, OSError):
        return error
    where = "" if getattr(error, "filename", None) else f"a file of {folder}"
    return StorageError.of(error, where)


def _report(session: Session, progress: Progress, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Write summary.json and the report. Returns the complete summary."""
    config = session.config
    whole = {
        "seed": config.seed,
        "layout": layout_text(config),
        **summary,
        "seconds_total": session.totals_now()["seconds_total"],
    }
    path = session.write_json("summary.json", whole)
    if config.trainer.report:
        report = write_report(session.folder)
        session.tracker.report(report)
        progress.message(f"report: {report}")
    progress.message(f"summary: {path}")
    return whole


def _with_clusters(
    config: RunConfig,
    preload: Preload | None,
    job: AnyJob,
    session: Session,
    progress: Progress,
    stops: Stops,
) -> Steps[dict[str, Any]]:
    """Run the job. If Ray itself is lost and was started by this run, resume from the last
    checkpoint in a fresh cluster, at most `trainer.max_restarts` times per hour.

    Raises:
        ClusterLostError: Ray was lost and cannot be restarted; the message explains how to resume.
    """
    limit = RestartLimit(config.trainer.max_restarts)
    goes_on = False
    while True:
        try:
            with ExitStack() as stack:
                given = Job(config, preload, session, stack, progress, goes_on)
                return (yield from job(given, stops))
        except ClusterLostError as error:
            if _interrupted(error):  # a signal to all of the run's processes also stopped Ray
                raise KeyboardInterrupt from error
            session.store.settle()
            is_over = config.cluster.address is not None or stops.summary is not None
            if is_over or not limit.take():
                raise ClusterLostError(
                    f"{error}. The run has ended: {_how_to_resume(session.store)}"
                ) from error
            progress.message(
                f"{error}: starting a fresh cluster and resuming from the last checkpoint"
            )
            goes_on = True


def _interrupted(error: BaseException | None) -> bool:
    """Return True if the error was raised while an interrupt was being handled."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _interrupted(error.__context__)
    )


@contextmanager
def _stop_when_asked(session: Session) -> Iterator[None]:
    """Treat SIGUSR1, which a job script sends before Slurm's time limit, as a request to save a
    checkpoint after the current step and stop."""

    def ask(number: int, frame: Any) -> None:
        session.stop_asked = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
