"""A dry run of a user's flow before anything starts: two steps on synthetic rows, with roles that
compute nothing and engines that generate nothing."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config import derived
from hybridflow.config.entries import FLOWS
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.dispatch import method_spec
from hybridflow.errors import ConfigError, FlowError, SchemaError
from hybridflow.observe.progress import Progress
from hybridflow.rollout.protocols import SyncReport
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices
from hybridflow.trainer.flow_errors import message_of, mistake
from hybridflow.trainer.flow_state import kept_state
from hybridflow.trainer.flow_text import dropped_result, file_of, text_of
from hybridflow.trainer.groups import log_prob_method, update_step
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.run import FlowRun, Trainer

STEPS = 2
PROMPTS = 2
_LIMIT_S = 30.0
_GRACE_S = 2.0  # for a cancelled flow to end
_MOST_CALLS = 1000
_NEVER_AWAITED = re.compile(r"coroutine '([\w.<>]+)' was never awaited")


def check_flow(config: RunConfig, say: Callable[[str], None]) -> None:
    """Run two steps of the flow named by `algorithm.flow`, if it is set. Flows selected by other
    settings need no check. Because the values are synthetic, an error that may be caused by the
    values is only a warning.

    Raises:
        ConfigError: the flow breaks a rule of flows, reads a column that is never written, contains
            a Python error that does not depend on values, or does not terminate. The message names
            the line.
    """
    name = derived.flow_name(config)
    if config.algorithm.flow is None:
        return
    invented = Invented(config)
    with Progress(0, "", enabled=False) as progress:
        run = FlowRun(cast(Trainer, invented.trainer()), progress, STEPS, is_tracing=True)
        gc.collect()  # report unrelated coroutines that were never awaited before the block below
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", RuntimeWarning)
            error = _error_of(run)
    if error is None:
        text = text_of(run.flow.body)
        error = (
            _forgotten(warned, file_of(run.flow.body))
            or _not_called(run, config, text)
            or dropped_result(text)
        )
    if error is not None and mistake(error) is not None:
        raise ConfigError(message_of(name, error)) from error
    for doubt in dict.fromkeys(run.doubts):
        say(f"warning: algorithm.flow={name}: {doubt}")
    if error is not None:
        said = message_of(name, error).replace(": ", ": over synthetic rows: ", 1)
        say(f"warning: {said}")


def _error_of(run: FlowRun) -> BaseException | None:
    """Run the flow and return the error that ended it, or None. The flow runs in a thread, which is
    abandoned if the flow blocks it."""
    ended: list[BaseException | None] = []

    async def follow() -> None:
        task = asyncio.ensure_future(_outcome(run))
        await asyncio.wait([task], timeout=_LIMIT_S)
        if not task.done():
            ended.append(_endless(run))
            task.cancel()
            await asyncio.wait([task], timeout=_GRACE_S)
        else:
            ended.append(task.result())

    thread = threading.Thread(target=lambda: asyncio.run(follow()), daemon=True)
    thread.start()
    thread.join(_LIMIT_S + 2 * _GRACE_S)
    return ended[0] if ended else _endless(run)


async def _outcome(run: FlowRun) -> BaseException | None:
    try:
        await run.follow()
    except BaseException as error:  # SystemExit and the like would stop the event loop
        return error
    return None


def _endless(run: FlowRun) -> FlowError:
    return FlowError(
        f"two steps over synthetic rows did not finish within {_LIMIT_S:.0f} s; put code that "
        "waits or computes for a long time under `if not run.is_tracing:`",
        line=run.body_line(),
    )


def _forgotten(warned: Sequence[warnings.WarningMessage], file: str) -> FlowError | None:
    """Return the error for a coroutine that the user's file created but never awaited. Coroutines
    from other files, which may be garbage-collected meanwhile, are ignored.
    """
    for one in warned:
        found = _NEVER_AWAITED.search(str(one.message))
        code = getattr(one.source, "cr_code", None)
        if found and file in (one.filename, getattr(code, "co_filename", "")):
            return FlowError(
                f"the coroutine {found[1]}(...) is never awaited; write `await` before its call",
                line=one.lineno if one.filename == file else None,
            )
    return None


def _not_called(run: FlowRun, config: RunConfig, text: str) -> FlowError | None:
    """Return the error for a flow that never makes a call required by the run's settings: an
    update, or a call to a role that the settings start. If the call appears in the file but is not
    reached in the two steps, only a warning is issued.
    """
    for call, (pattern, why) in _wanted(config).items():
        if any(name.startswith(call) for name in run.called):
            continue
        if not re.search(pattern, text):
            return FlowError(f"the flow never calls run.{call}: {why}", line=run.flow.line)
        run.doubts.append(f"run.{call} was not called in any of the {STEPS} steps of the check")
    return None


def _wanted(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Return {call: (regular expression that finds the call in a flow's file, suggested fix)} for
    each required call.
    """
    if config.trainer.rollout_only:
        return {}
    none = "it would train nothing; to generate answers only, set trainer.rollout_only=true"
    wanted = {"policy.update(batch)": (r"\.update\b", none)}
    for role in derived.roles_in_use(config):
        why = f"this run has a {role.replace('_', ' ')}; call it, or remove its settings"
        if ROLES[role].head == "value":
            wanted[f"{role}.values(batch)"] = (rf"\b{role}\.values\b", why)
            wanted[f"{role}.update(batch)"] = (
                rf"\b{role}\.update\b",
                f"it would learn nothing, and {why}",
            )
        elif role != "actor":
            wanted[f"{role}."] = (rf"\.{role}\b", why)
    if config.reward_model.trains:
        wanted["reward_model.update(pairs)"] = (
            r"reward_model\.update\b",
            "it would learn nothing; call it, or set reward_model.trains=false",
        )
    for name in config.roles:
        why = f"this run has a policy {name} (roles.{name}); call it, or remove it"
        wanted[f"{name}."] = (rf"\.{name}\b", why)
    return wanted


class Invented:
    """Stand-ins for a run's components. They produce synthetic rows."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.calls = 0

    def trainer(self) -> SimpleNamespace:
        """Return a stand-in for the trainer with every attribute that `FlowRun` uses."""
        config = self.config
        roles = [name for name in derived.roles_in_use(config) if name != "actor"]
        session = SimpleNamespace(
            timeline=_Timeline(),
            timed=_nothing,
            controlled=_nothing,
            is_due=lambda every, step: False,
            stop_asked=False,
            stop_if_asked=_later,
            store=SimpleNamespace(check=_later),
        )
        state: dict[str, Any] = {}

        async def save() -> None:
            kept_state(state)

        return SimpleNamespace(
            config=config,
            session=session,
            policy=_Role(self, "actor"),
            learners={name: self.learner(name) for name in config.roles},
            others={name: _Role(self, name) for name in roles},
            engines=SimpleNamespace(sync=self.sync, load_metrics=self.no_metrics),
            samples=SimpleNamespace(
                take=self.samples,
                of_prompts=self.of_prompts,
                keep=lambda batch: batch,
                metrics={},
            ),
            advantages=Advantages(config),
            devices=Devices(lambda role: "all", cast(Any, session.timeline)),
            phases=SimpleNamespace(training=_memory, sync=_memory),
            records=SimpleNamespace(
                check_log_probs=lambda batch, step, name: None,
                rollouts=_nothing,
                trained=_later,
                of_policy=lambda name, tokenizer, trained, step: {},
                validate=_later,
            ),
            state=state,
            step=0,
            last=STEPS,
            left_out=set(),
            save=save,
        )

    def count(self) -> None:
        """Count a role call, and raise FlowError if there are too many."""
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise FlowError(f"more than {_MOST_CALLS} role calls in {STEPS} steps")

    async def samples(self, step: int, greedy: bool = False) -> DataProto:
        """Return synthetic answers whose length alternates between 1 and 3 tokens, with scores of 0
        and 1.
        """
        n = 2 if self.config.data.answers == "pairs" else max(self.config.rollout.n, 1)
        batch = self.answers(PROMPTS, n)
        rows = len(batch)
        scores = (np.arange(rows) % 2).astype(np.float32)
        batch = batch.with_columns(scores=scores, index=batch["uid"])
        texts: dict[str, Any] = {
            "data_source": "invented",
            "ground_truth": "text",
            "extra_info": {},
        }
        if self.config.data.keep_prompts:
            texts["prompt"] = [{"role": "user", "content": "text"}]
        if numbers := FLOWS.get(derived.flow_name(self.config)).rewards:
            texts["reward_extra"] = dict.fromkeys(numbers, 1.0)
        batch = batch.with_columns(
            **{name: objects([value] * rows) for name, value in texts.items()}
        )
        return batch.union(invented(batch, ["greedy_scores"], by_sample=True)) if greedy else batch

    def answers(self, prompts: int, n: int) -> DataProto:
        """Return `n` synthetic answers per prompt, for `prompts` prompts. Their length alternates
        between 1 and 3 tokens.
        """
        rows = prompts * n
        ids = [np.arange(1 + 2 * (row % 2)) for row in range(rows)]

        return DataProto.from_columns(
            {
                "uid": np.repeat(np.arange(prompts), n),
                "prompt_ids": Jagged.from_rows([np.arange(2)] * rows, np.int64),
                "response_ids": Jagged.from_rows(ids, np.int64),
                "response_mask": Jagged.from_rows([np.ones(len(row)) for row in ids], np.bool_),
                "response_versions": Jagged.from_rows([0 * row for row in ids], np.int64),
                "rollout_log_probs": Jagged.from_rows([-1.0 - row for row in ids], np.float32),
                "response_text": objects(["text"] * rows),
                "finish_reason": objects(["stop"] * rows),
                "weight_version": objects(["0"] * rows),
            }
        )

    async def of_prompts(self, prompts: Sequence[Any], n: int) -> DataProto:
        """Return synthetic samples for prompts that the flow generates."""
        self.count()
        return self.answers(len(prompts), n)

    async def no_metrics(self) -> dict[str, float]:
        """Return an empty mapping, because no engine runs."""
        return {}

    def learner(self, name: str) -> SimpleNamespace:
        """Return a stand-in for an additional policy with every attribute that a flow uses."""
        config = derived.policy_view(self.config, name)
        own = Invented(config)

        async def generate(prompts: Sequence[Any], n: int) -> DataProto:
            self.count()
            return own.answers(len(prompts), n)

        return SimpleNamespace(
            name=name,
            config=config,
            frozen=self.config.roles[name].frozen,
            base=self.config.roles[name].base,
            policy=_Role(own, "actor"),
            keep=lambda batch: batch,
            advantages=Advantages(config),
            phases=SimpleNamespace(training=_memory, sync=_memory),
            left_out=set(),
            tokenizer=None,
            generate=generate,
            take=_later,
            engines=SimpleNamespace(sync=self.sync),
        )

    async def sync(self, version: int) -> SyncReport:
        """Return an empty sync report without transferring any weights."""
        return SyncReport(version, 0.0, 0, {})


class _Role:
    """A stand-in for a role. Checks that the columns read by its calls exist, and fills the columns
    that they write with synthetic values."""

    def __init__(self, world: Invented, name: str) -> None:
        self.world = world
        self.name = name

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """Implement `protocols.Role.compute`."""
        self.world.count()
        spec = method_spec(method)
        _require(spec.name, spec.reads, batch)
        return invented(batch, spec.writes, by_sample=ROLES[self.name].head == "score")

    async def log_probs(self, batch: DataProto) -> DataProto:
        """Implement `protocols.Policy.log_probs`."""
        return await self.compute(log_prob_method(self.world.config), batch)

    async def later_log_probs(self, batch: DataProto, seed: int) -> DataProto:
        """Implement `protocols.Policy.later_log_probs`."""
        return await self.log_probs(batch)

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        """Implement `protocols.Role.update`."""
        self.world.count()
        is_policy = self.name == "actor"
        reads = update_step(self.world.config).reads if is_policy else method_spec(method).reads
        _require(f"the update of the {'policy' if is_policy else self.name}", reads, batch)
        return []

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[Sequence[Update], DataProto]:
        """Implement `protocols.Policy.update_and_score`."""
        scored = batch.union(await self.log_probs(batch))
        return await self.update(update_step, scored), scored


def invented(batch: DataProto, names: Sequence[str], by_sample: bool) -> DataProto:
    """Return synthetic columns with these names for the rows of the batch: f32, either [B] or one
    value per response token."""
    response = batch.jagged("response_ids")
    made: dict[str, Any] = {}
    for name in names:
        if by_sample:
            made[name] = np.linspace(0.0, 1.0, len(batch), dtype=np.float32)
        else:
            made[name] = Jagged(np.full(len(response.values), -1.0, np.float32), response.offsets)
    return DataProto.from_columns(made)


def _require(what: str, reads: Sequence[str], batch: DataProto) -> None:
    missing = [name for name in reads if name not in batch]
    if missing:
        raise SchemaError(
            f"{what} reads {', '.join(missing)}, which no earlier call has added to its batch"
        )


class _Timeline:
    """Records nothing."""

    def begin(self, name: str, step: int | None = None) -> SimpleNamespace:
        """A span that records nothing."""
        return SimpleNamespace(end=lambda error="": None)

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """A phase that records nothing."""
        yield


@contextmanager
def _nothing(*given: Any) -> Iterator[None]:
    yield


@asynccontextmanager
async def _memory() -> AsyncIterator[None]:
    yield


async def _later(*given: Any) -> None:
    """Do nothing, asynchronously."""
