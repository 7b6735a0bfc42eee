"""What the body of a flow is given: the names of `flows.base.Run`, and no others."""

from __future__ import annotations

import numbers
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.errors import FlowError
from hybridflow.flows.base import ROLES
from hybridflow.rollout.sampling_control import without_rows
from hybridflow.trainer.flow_calls import (
    Noting,
    Pending,
    Updating,
    checked_batch,
    checked_calls,
)

_METRIC = re.compile(r"[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*")


class FollowedRun(Noting, Protocol):
    """The run behind it (`trainer.run.FlowRun`)."""

    is_tracing: bool
    options: Any
    metrics: dict[str, float]

    @property
    def parts(self) -> Mapping[str, object]:
        """The parts of further policies, by their names."""

    @property
    def state(self) -> dict[str, Any]:
        """The flow's own values."""

    def role(self, name: str) -> Any:
        """A role that the flow has declared."""

    def open_step(self, what: str) -> int:
        """The number of the open step, in which `what` is called."""

    async def next_step(self, steps: AsyncIterator[int]) -> int:
        """End the open step, and begin the next one."""

    async def take_samples(self, step: int, greedy: bool) -> DataProto:
        """The samples of the step."""

    def add_advantages(self, batch: DataProto) -> DataProto:
        """The batch with advantages."""

    async def bring_to_engines(self, step: int) -> None:
        """Bring the policy's weights to the engines."""


class FlowApi:
    """`flows.base.Run`."""

    __slots__ = ("_run",)
    _run: FollowedRun

    def __init__(self, run: FollowedRun) -> None:
        object.__setattr__(self, "_run", run)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        key = "" if name == "state" else f"[{name!r}]"
        raise FlowError(
            f"run.{name} cannot be set: a flow is started again after a loss, with another run; "
            f"keep what must survive in run.state{key or '[name]'}, and all else in variables"
        )

    def __getattr__(self, name: str) -> Any:
        """A role (`flows.base.ROLES`), or a further policy of the run."""
        if name not in ROLES and name not in self._run.parts:
            raise AttributeError(f"the run has no {name!r}", name=name, obj=self)
        return self._run.role(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *ROLES, *self._run.parts]

    @property
    def state(self) -> dict[str, Any]:
        """Values of the flow's own, which a checkpoint holds."""
        return self._run.state

    @property
    def options(self) -> Any:
        """The flow's options, as `algorithm.flow_options` gives them."""
        return self._run.options

    @property
    def is_tracing(self) -> bool:
        """Whether this is the check over invented rows (`trainer.flow_check`)."""
        return self._run.is_tracing

    def steps(self) -> Steps:
        """The numbers of the steps that are left."""
        return Steps(self._run)

    def samples(self, *, greedy: bool = False) -> Awaitable[DataProto]:
        """The samples of the step. From here on the devices' memory is the policy's."""
        run = self._run
        step = run.open_step("samples()")
        return Pending(run, "samples()", lambda: run.take_samples(step, greedy))

    def all(self, *calls: Awaitable[DataProto]) -> Awaitable[DataProto]:
        """The batch of the calls with the columns of all of them."""
        run = self._run
        run.open_step("all(...)")
        found = checked_calls(calls)
        return Pending(run, "all(...)", lambda: found[0].run.merged(found))

    def advantages(self, batch: DataProto) -> DataProto:
        """The batch with advantages.

        Raises:
            LogprobMismatchError: engines and trainer differ by more than the bound.
        """
        given = checked_batch(batch, "advantages")
        with self._run.calling():
            return self._run.add_advantages(given)

    def leave_out(self, batch: DataProto, rows: np.ndarray) -> DataProto:
        """The batch with no token of the `rows` [B] bool in its response mask."""
        given = checked_batch(batch, "leave_out")
        chosen = np.asarray(rows)
        if chosen.dtype != bool or chosen.shape != (len(given),):
            raise FlowError(
                f"leave_out(batch, rows) takes a truth value for each of the {len(given)} rows, "
                f"and was given {chosen.dtype} {list(chosen.shape)}"
            )
        return without_rows(given, chosen)

    def later(self, update: Awaitable[None]) -> None:
        """Let an update of the critic last beyond the step."""
        if not isinstance(update, Updating) or update.name != "critic.update(batch)":
            raise FlowError("later(...) takes an update of the critic: run.critic.update(batch)")
        update.take()

    def sync(self) -> Awaitable[None]:
        """Bring the weights of the policies that were updated to their engines, where these are
        going to be asked: answers are sampled, or a validation follows."""
        run = self._run
        step = run.open_step("sync()")
        return Pending(run, "sync()", lambda: run.bring_to_engines(step))

    def record(self, **values: float) -> None:
        """Record numbers of the flow's own with this step's metrics, as flow/NAME."""
        step = self._run.open_step("record(...)")
        for name, value in values.items():
            if not _METRIC.fullmatch(name):
                raise FlowError(f"record(...): {name!r} is no name of a metric; use letters and _")
            number = _number(value)
            if number is None or not np.isfinite(number):
                raise FlowError(
                    f"step {step}: record({name}=...) takes a finite number, and was given "
                    f"{value!r:.80}"
                )
            self._run.metrics[f"flow/{name}"] = number


def _number(value: object) -> float | None:
    """The value as a float, also of an array or tensor with one element; None of anything else."""
    if isinstance(value, numbers.Real):
        return float(value)
    try:
        return float(np.asarray(value).astype(np.float64, casting="same_kind").item())
    except (TypeError, ValueError, RuntimeError):
        return None


class Steps(AsyncIterator[int]):
    """Not a generator, whose end would come when Python collects it."""

    def __init__(self, run: FollowedRun) -> None:
        self._run = run

    async def __anext__(self) -> int:
        with self._run.calling():
            return await self._run.next_step(self)

    def __iter__(self) -> NoReturn:
        raise FlowError("steps() is waited for; write `async for step in run.steps():`")
