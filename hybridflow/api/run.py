"""`Run`: a training run as a Python object."""

from __future__ import annotations

import atexit
import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hybridflow.api.given import PARTS, Given
from hybridflow.api.place import Place, place_for_caller
from hybridflow.api.settings import text, words
from hybridflow.config.registry import forget_edited_files
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, FlowError, HybridFlowError
from hybridflow.process.extras import KERNELS, naming_packages, require
from hybridflow.process.importing import without_collection

if TYPE_CHECKING:
    from hybridflow.batch import DataProto
    from hybridflow.trainer.loop import RLTrainer
    from hybridflow.trainer.stopping import Steps, Stops

T = TypeVar("T")
_ENDED = object()


class Run:
    """A reinforcement learning run with the same settings, checks and results as `hybridflow
    train`.

    Nothing starts until the first call that needs it. A process can have one open run at a time.

    Args:
        overrides: settings of the form `"key=value"`, as on the command line.
        recipe: name of a recipe, or path of a YAML file.
        model: a Hugging Face folder or hub id (`model.path`).
        data: training rows: a path, several paths, a list of dictionaries, or a table with
            `to_parquet` (`datasets.Dataset`, DataFrame); or {"train": ..., "test": ...} with such
            values. Dictionaries passed for model, data and reward may also contain keys of that
            section.
        reward: a function that scores a response, or "path/to/file.py:name".
        flow: the algorithm, as a function decorated with `flow`, the name of a built-in flow, or
            "path/to/file.py:name".
        tokenizer: a Hugging Face folder (`model.tokenizer`).
        where: "here" runs in this process; "slurm" makes the constructor submit this program as a
            Slurm job and exit. Inside the job, the same line starts the run.
        slurm: options of `hybridflow slurm submit`, keyed by name, for example {"nodes": 2}.
        settings: any other keys, nested (`trainer={"total_steps": 5}`) or dotted
            (`**{"trainer.total_steps": 5}`).

    Raises:
        ConfigError: a setting is invalid; the message is the same as on the command line.
    """

    def __init__(
        self,
        *overrides: str,
        recipe: str | Path,
        model: str | Path | Mapping[str, Any] | None = None,
        data: Any = None,
        reward: Callable[..., Any] | str | Path | Mapping[str, Any] | None = None,
        flow: Callable[..., Any] | str | None = None,
        tokenizer: str | Path | None = None,
        where: str = "here",
        slurm: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        if where not in ("here", "slurm"):
            raise ConfigError(f'where must be "here" or "slurm", got {where!r}')
        if slurm is not None and where == "here":
            raise ConfigError('slurm=... has an effect only with where="slurm"')
        own_model, settings = _object("model", model, settings)
        reward, settings = _object("reward", reward, settings)
        data, settings = _object("data", data, settings, parts=PARTS)
        if _open is None or _open._summary is not None:
            forget_edited_files()
        self._given = Given()
        with tempfile.TemporaryDirectory() as scratch:
            if data is not None:
                self._given.add_data(data, Path(scratch))
            if reward is not None:
                self._given.add_reward(reward)
            if flow is not None:
                self._given.add_flow(flow)
            own = [*overrides, *words(settings)]
            self.config = _load(recipe, self._given, own, own_model, data, tokenizer)
            self._folder_given = Path(f"{self.folder}.given")
            self._given.write(self._folder_given)
        if where == "slurm":
            self.config = _in_job(self.config, slurm or {}, own)
        else:
            self.config = _checked(self.config)
        self._place: Place | None = None
        self._job: Steps[None] | None = None
        self._stops: Stops | None = None
        self._told = 0  # the last step yielded by `steps`
        self._is_by_hand: bool | None = None
        self._may_answer = True  # the engines have the current weights, and memory
        self._saved = 0
        self._summary: dict[str, Any] | None = None
        self._last_step = 0
        self._last_metrics: dict[str, float] = {}
        self.policy = Role(self, "policy")
        self.critic = Role(self, "critic")
        self.cost_critic = Role(self, "cost_critic")
        self.reference = Role(self, "reference")
        self.reward_model = Role(self, "reward_model")
        self.teacher = Role(self, "teacher")
        # additional policies, keyed by name
        self.roles = {name: Role(self, name) for name in self.config.roles}

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output_dir) / self.config.name

    @property
    def step(self) -> int:
        """Number of the current or last step; 0 before the run has started."""
        if self._stops is not None and self._stops.trainer is not None:
            self._last_step = self._stops.trainer.step
        return self._last_step

    @property
    def metrics(self) -> dict[str, float]:
        """The training metrics of the last recorded step."""
        if self._stops is not None and self._stops.job is not None:
            self._last_metrics = self._stops.job.session.latest.get("train", {})
        return dict(self._last_metrics)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The contents of summary.json; None until the run has finished."""
        return self._summary

    # ---- training

    def train(self) -> dict[str, Any]:
        """Run all remaining steps and return the summary."""
        for _ in self.steps():
            continue
        assert self._summary is not None
        return self._summary

    def steps(self) -> Iterator[dict[str, float]]:
        """Run step by step and yield the metrics of each step, including its number as `step`.

        After a `break`, the run is paused; `steps()` or `train()` continues it. After the last
        step, the model is exported and the report is written.
        """
        while self._summary is None:
            self._begin(by_hand=False)
            if self._advance():
                yield self._record()

    def steps_by_hand(self) -> Iterator[int]:
        """Yield steps that the caller executes using `samples`, the roles, `advantages` and `sync`.
        As in a flow, a step ends when the next one is requested."""
        while self._summary is None:
            self._begin(by_hand=True)
            self._advance()
            assert self._stops is not None
            if self._stops.is_in_step:
                yield self.step

    # ---- a step by hand

    def samples(self, *, greedy: bool = False) -> DataProto:
        """Return the step's samples: prompts, responses and scores."""
        self._may_answer = False
        found: DataProto = self._in_step(lambda flow: flow.samples(greedy=greedy))
        return found

    def advantages(self, batch: DataProto, of: str = "scores") -> DataProto:
        """Return the batch with advantages and, if there is a critic, returns. With `of="costs"`,
        computes cost_advantages and cost_returns from the column costs instead.
        """

        async def add(flow: Any) -> DataProto:
            found: DataProto = flow.advantages(batch, of)
            return found

        found: DataProto = self._in_step(add)
        return found

    def sync(self) -> None:
        """Send the policy's weights to the engines."""
        self._in_step(lambda flow: flow.sync())
        self._may_answer = True

    # ---- between steps

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out prompts. Returns the metrics without
        recording them.

        Raises:
            ConfigError: there are no held-out prompts.
        """
        trainer = self._answering("evaluate()")
        validator = trainer.records.validator
        if not validator.datasets:
            raise ConfigError(
                'there are no held-out prompts; pass data={"train": ..., "test": ...} or set '
                "data.val_files"
            )
        return self._wait(lambda: validator.run(trainer.engines, trainer.step))

    def generate(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        max_new_tokens: int | None = None,
    ) -> list[str]:
        """Generate answers to prompts (texts, or lists of chat messages) with the current weights,
        sampled according to `rollout.val_sampling`."""
        from hybridflow.rollout.answering import answer

        trainer = self._answering("generate()")
        tokenizer = trainer.records.validator.scorer.tokenizer
        work = partial(answer, trainer.engines, tokenizer, self.config.data)
        return self._wait(lambda: work(list(prompts), max_new_tokens))

    def chat(
        self, messages: Sequence[Mapping[str, Any]] | str, max_new_tokens: int | None = None
    ) -> dict[str, str]:
        """Return the policy's answer to a text or to chat messages, as the next chat message.
        Samples in the same way as `generate`.
        """
        (text,) = self.generate([messages], max_new_tokens)
        return {"role": "assistant", "content": text}

    def save(self) -> Path:
        """Write a checkpoint of the current step and return its folder."""
        self._refuse_in_step("save()")
        trainer = self._trainer()

        async def save() -> Path:
            await trainer.save()
            await trainer.session.store.wait()
            latest = trainer.session.store.latest()
            assert latest is not None
            return latest.folder

        folder = self._wait(save)
        self._saved = trainer.step
        return folder

    def export(self, folder: str | Path | None = None) -> Path:
        """Export the current weights to a Hugging Face folder, by default `export` in the run
        folder. Returns its path."""
        from hybridflow.saving.model_card import write_card
        from hybridflow.workers.role import RoleWorker

        trainer = self._trainer()
        target = Path(folder) if folder is not None else self.folder / "export"

        async def export() -> None:
            await trainer.policy.call(RoleWorker.export, target)

        self._wait(export)
        write_card(target, self.folder, trainer.step)
        return target

    # ---- the end

    def close(self, *, save: bool = True) -> None:
        """Stop the ranks and engines. If the run is between two steps, a checkpoint is written
        first; a run with the same settings continues from it."""
        if self._job is None:
            return
        try:
            if save and self._is_worth_saving():
                self.save()
        finally:
            # a finished run continues from its last stop
            self._end((lambda job: job.close()) if self._summary is None else _go_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(save=error is None)

    def _is_worth_saving(self) -> bool:
        stops = self._stops
        if stops is None or stops.trainer is None or stops.is_in_step or self._summary is not None:
            return False
        return self.step > self._saved and not self.config.trainer.rollout_only

    # ---- the job behind it

    def _begin(self, by_hand: bool | None = None) -> None:
        """Start the run and execute it up to its first stop, unless it has already started.
        `by_hand` determines whether the caller executes the steps; it cannot be changed later.
        """
        if self._job is None:
            self._start()
        if by_hand is None:
            return
        if self._is_by_hand is None:
            self._is_by_hand = by_hand
            assert self._stops is not None and self._stops.trainer is not None
            self._stops.trainer.body = self._stops.by_hand if by_hand else None
        elif self._is_by_hand != by_hand:
            now, other = ("steps_by_hand()", "steps() or train()")[:: 1 if self._is_by_hand else -1]
            raise HybridFlowError(
                f"this run already uses {now}; to use {other} instead, close it and create another "
                "Run with the same settings, which continues from its checkpoint"
            )

    def _start(self) -> None:
        global _open
        if self._summary is not None:
            raise HybridFlowError(
                f"the run {self.folder} is closed; create another Run, or load {self.folder}/export"
            )
        if _open is not None and _open._summary is None:
            raise HybridFlowError(
                f"this process already has an open run, {_open.folder}, after step {_open.step}; "
                "finish it (train()) or close it (close()) before starting another"
            )
        if _open is not None:
            _open.close()
        with naming_packages("hybridflow.Run"):
            require(KERNELS, *_libraries(self.config))
            from hybridflow.trainer.stopping import Stops

        # registered after that import, so that it runs before the event loop is closed
        atexit.unregister(_close_open)
        atexit.register(_close_open)
        self._given.offer(self._folder_given)
        self._stops = Stops(enabled=True)
        self._place = place_for_caller()
        self._job = _job(self.config, self._stops)
        self._is_by_hand = None
        _open = self
        self._next()
        self._told = self._saved = self.step
        self._place.check()

    def _next(self) -> None:
        """Execute the run up to its next stop, or to the end."""
        job = self._job
        assert job is not None and self._place is not None and self._stops is not None
        try:
            with naming_packages("hybridflow.Run"):
                self._place.run(partial(_go_on, job))
        except BaseException:
            self._forget()
            raise
        self._summary = self._stops.summary

    def _advance(self) -> bool:
        """Execute the run up to its next stop. Returns True if a step has ended."""
        self._next()
        self._may_answer = True
        step = self.step
        is_new = step > self._told
        self._told = step  # smaller than before if the run returned to a checkpoint
        if self._place is not None:
            self._place.check()
        return is_new

    def _record(self) -> dict[str, float]:
        flow = self._trainer().run
        if self._summary is None and flow is not None:
            self._wait(flow.record)  # a critic on separate devices may still be updating
        found = self.metrics
        return found if found.get("step") == self.step else {"step": self.step}

    def _trainer(self) -> RLTrainer:
        self._begin()
        assert self._stops is not None and self._stops.trainer is not None
        return self._stops.trainer

    def _answering(self, what: str) -> RLTrainer:
        trainer = self._trainer()
        if not self._may_answer:
            raise FlowError(
                f"{what} cannot be called between samples() and sync(), because the engines hold "
                "outdated weights or have released their memory; call it after sync()"
            )
        return trainer

    def _refuse_in_step(self, what: str) -> None:
        if self._stops is not None and self._stops.is_in_step:
            raise FlowError(f"{what} cannot be called inside a step; call it after the step")

    def _in_step(self, call: Callable[[Any], Any]) -> Any:
        """Execute a call within the open step and return its result."""
        stops = self._stops
        if stops is None or not stops.is_in_step or stops.trainer is None:
            raise FlowError("call this only inside `for step in run.steps_by_hand():`")
        run = stops.trainer.run
        assert run is not None
        flow = run.api

        async def made() -> Any:
            return await call(flow)

        try:
            return self._wait(made)
        except FlowError:
            raise  # the step is still open
        except BaseException as error:
            failed = error
        self._end(lambda job: job.throw(failed))

    def _wait(self, call: Callable[[], Any]) -> Any:
        """Run a coroutine in the run's event loop and return its result."""
        from hybridflow.single_controller import block_on

        assert self._place is not None
        return self._place.run(lambda: block_on(call()))

    def _end(self, how: Callable[[Steps[None]], object]) -> None:
        job = self._job
        assert job is not None and self._place is not None
        try:
            self._place.run(lambda: how(job))
        finally:
            self._forget()

    def _forget(self) -> None:
        """Drop all references to the run's job, so that its memory can be freed."""
        global _open
        self._last_step, self._last_metrics = self.step, self.metrics
        if self._place is not None:
            self._place.close()
        self._place = self._job = self._stops = None
        if _open is self:
            _open = None


class Role:
    """A role of a run, for use in steps that the caller executes."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._name = name

    def _call(self, method: str, batch: DataProto) -> Any:
        def call(flow: Any) -> Any:
            role = getattr(flow, self._name)
            if not hasattr(role, method):
                raise FlowError(f"run.{self._name} has no {method}(batch)")
            return getattr(role, method)(batch)

        return self._run._in_step(call)

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return the batch with the log-probs of its responses added."""
        found: DataProto = self._call("log_probs", batch)
        return found

    def values(self, batch: DataProto) -> DataProto:
        """Return the batch with the critic's values added."""
        found: DataProto = self._call("values", batch)
        return found

    def scores(self, batch: DataProto) -> DataProto:
        """Return the batch with the reward model's scores added."""
        found: DataProto = self._call("scores", batch)
        return found

    def update(self, batch: DataProto) -> None:
        """Run all updates of a step."""
        self._call("update", batch)

    def generate(
        self, prompts: Sequence[str | Sequence[Mapping[str, Any]]], n: int | None = None
    ) -> DataProto:
        """Generate `n` samples (default: `rollout.n`) per prompt for training a policy. Call this
        before the policy's passes or after `sync()`."""
        found: DataProto = self._run._in_step(
            lambda flow: getattr(flow, self._name).generate(prompts, n)
        )
        return found

    def advantages(self, batch: DataProto) -> DataProto:
        """Return the batch of an additional policy with advantages computed from its scores."""

        async def add(flow: Any) -> DataProto:
            found: DataProto = getattr(flow, self._name).advantages(batch)
            return found

        found: DataProto = self._run._in_step(add)
        return found

    def take(self, other: Role) -> None:
        """Copy the weights of another policy, which must use the same model, to this additional
        policy.
        """
        self._run._in_step(lambda flow: getattr(flow, self._name).take(getattr(flow, other._name)))


_open: Run | None = None


def _close_open() -> None:
    if _open is not None:
        with suppress(BaseException):
            _open.close(save=False)


def _go_on(job: Steps[None]) -> None:
    next(job, None)


def _object(
    section: str, given: Any, settings: Mapping[str, Any], parts: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Split a dictionary passed for a section into the object that it contains, if any, and
    settings for the section's other keys.
    """
    if not isinstance(given, Mapping):
        return given, dict(settings)
    keys = {name: value for name, value in given.items() if name not in parts}
    rest = {name: value for name, value in given.items() if name in parts}
    return rest or None, {section: keys, **settings} if keys else dict(settings)


def _load(
    recipe: str | Path,
    given: Given,
    own: Sequence[str],
    model: str | Path | None,
    data: Any,
    tokenizer: str | Path | None,
) -> RunConfig:
    """Load the configuration from the recipe, the Python objects and the settings."""
    from hybridflow.config.load import load_config

    path = Path(recipe)
    is_file = path.suffix == ".yaml" and path.is_file()
    first = list(given.words)
    if model is not None:
        first += [f"model.path={text(model, 'model')}", "model.tokenizer=null"]
        first += ["data.prepare.task=null"] if data is not None else []
    if tokenizer is not None:
        first.append(f"model.tokenizer={text(tokenizer, 'tokenizer')}")
    folder = path.parent if is_file else None
    config = load_config(path.stem if is_file else str(recipe), [*first, *own], folder)
    if model is not None and not any("model.hf_config" in word for word in own):
        # the recipe's sizes belong to the model that this one replaces
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, hf_config={}))
    return config


def _checked(config: RunConfig) -> RunConfig:
    """Resolve hub ids to folders and run all checks that do not need torch. Returns the
    configuration."""
    from hybridflow.config.check import check
    from hybridflow.config.habits import warnings as habits
    from hybridflow.config.hub import located

    config = located(config)
    check(config, "train")
    for line in habits(config):
        warnings.warn(line, stacklevel=3)
    return config


def _in_job(config: RunConfig, options: Mapping[str, Any], words: list[str]) -> RunConfig:
    """Submit the program or, if it already is the job's driver, return the configuration for a run
    on the job's Ray cluster."""
    from hybridflow.api.job import checked_for_a_job, job_address, options_of, submit

    wanted = options_of(options)
    joined = checked_for_a_job(config, words)
    address = job_address()
    if address is None:
        _checked(joined)
        submit(config, wanted)
    cluster = dataclasses.replace(joined.cluster, address=address)
    return _checked(dataclasses.replace(joined, cluster=cluster))


def _libraries(config: RunConfig) -> tuple[str, ...]:
    """Return the packages from optional extras that the run imports."""
    return ("torch", "transformers", *(() if config.cluster.in_process else ("ray",)))


def _job(config: RunConfig, stops: Stops) -> Steps[None]:
    """Execute the whole job as a generator that yields control to the caller at each stop."""
    from hybridflow.config.derived import generates
    from hybridflow.process.obstacles import require_none
    from hybridflow.trainer.preload import Preload

    require_none((*_libraries(config), "numpy", "pyarrow"))
    with Preload(config, with_engines=generates(config)) as preload:
        with without_collection():
            from hybridflow.models.check import check
            from hybridflow.trainer.app import training

        check(config, "train")
        yield from training(config, preload, stops)
