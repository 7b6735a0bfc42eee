"""The object passed to a flow's body. It exposes exactly the attributes of `flows.base.Run`."""

from __future__ import annotations

import numbers
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.role_table import CRITICS
from hybridflow.data.packing import without_rows
from hybridflow.errors import FlowError
from hybridflow.flows.base import ROLES
from hybridflow.trainer.flow_calls import (
    Noting,
    Pending,
    Updating,
    checked_batch,
    checked_calls,
)

_METRIC = re.compile(r"[A-Za-z0-9_]+(?:[./-][A-Za-z0-9_]+)*")


class FollowedRun(Noting, Protocol):
    """The run that the API object delegates to (`trainer.run.FlowRun`)."""

    is_tracing: bool
    options: Any
    metrics: dict[str, float]

    @property
    def parts(self) -> Mapping[str, object]:
        """The run's state for each additional policy, keyed by policy name."""

    @property
    def state(self) -> dict[str, Any]:
        """The flow's saved values."""

    def role(self, name: str) -> Any:
        """Return a role that the flow has declared."""

    def open_step(self, what: str) -> int:
        """Return the number of the open step. `what` is the call's name in error messages."""

    async def next_step(self, steps: AsyncIterator[int]) -> int:
        """End the open step and begin the next one."""

    async def take_samples(self, step: int, greedy: bool) -> DataProto:
        """Return the step's samples."""

    def add_advantages(self, batch: DataProto, of: str) -> DataProto:
        """Return the batch with advantages."""

    async def bring_to_engines(self, step: int) -> None:
        """Send the policy's weights to the engines."""


class FlowApi:
    """Implementation of `flows.base.Run`."""

    __slots__ = ("_run",)
    _run: FollowedRun

    def __init__(self, run: FollowedRun) -> None:
        object.__setattr__(self, "_run", run)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        key = "" if name == "state" else f"[{name!r}]"
        raise FlowError(
            f"run.{name} cannot be set: after a failure the flow restarts with a new run object; "
            f"store values that must survive in run.state{key or '[name]'}, and all others in "
            "variables"
        )

    def __getattr__(self, name: str) -> Any:
        """Look up a role (`flows.base.ROLES`) or an additional policy by name."""
        if name not in ROLES and name not in self._run.parts:
            raise AttributeError(f"the run has no {name!r}", name=name, obj=self)
        return self._run.role(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *ROLES, *self._run.parts]

    @property
    def state(self) -> dict[str, Any]:
        """Values stored by the flow, which are saved in checkpoints."""
        return self._run.state

    @property
    def options(self) -> Any:
        """The flow's options, from `algorithm.flow_options`."""
        return self._run.options

    @property
    def is_tracing(self) -> bool:
        """True during the check with synthetic rows (`trainer.flow_check`)."""
        return self._run.is_tracing

    def steps(self) -> Steps:
        """Return an async iterator over the numbers of the remaining steps."""
        return Steps(self._run)

    def samples(self, *, greedy: bool = False) -> Awaitable[DataProto]:
        """Return the step's samples. From this call until the sync, device memory is reserved for
        the policy.
        """
        run = self._run
        step = run.open_step("samples()")
        return Pending(run, "samples()", lambda: run.take_samples(step, greedy))

    def all(self, *calls: Awaitable[DataProto]) -> Awaitable[DataProto]:
        """Return the batch passed to the calls, with the columns that they add."""
        run = self._run
        run.open_step("all(...)")
        found = checked_calls(calls)
        return Pending(run, "all(...)", lambda: found[0].run.merged(found))

    def advantages(self, batch: DataProto, of: str = "scores") -> DataProto:
        """Return the batch with advantages computed from a column [B].

        Raises:
            LogprobMismatchError: the log-probs of engines and trainer differ by more than the
                bound.
        """
        given = checked_batch(batch, "advantages")
        if of not in CRITICS:
            raise FlowError(
                f"advantages(batch, of={of!r}): of must be {' or '.join(map(repr, CRITICS))}"
            )
        with self._run.calling():
            return self._run.add_advantages(given, of)

    def leave_out(self, batch: DataProto, rows: np.ndarray) -> DataProto:
        """Return the batch with the response mask cleared for `rows` [B] bool."""
        given = checked_batch(batch, "leave_out")
        chosen = np.asarray(rows)
        if chosen.dtype != bool or chosen.shape != (len(given),):
            raise FlowError(
                f"leave_out(batch, rows): rows must contain one bool for each of the {len(given)} "
                "rows, "
                f"got {chosen.dtype} {list(chosen.shape)}"
            )
        return without_rows(given, chosen)

    def later(self, update: Awaitable[None]) -> None:
        """Let a critic's update continue after the step has ended."""
        critics = [f"{name}.update(batch)" for name in CRITICS.values()]
        if not isinstance(update, Updating) or update.name not in critics:
            raise FlowError(
                f"later(...): expected an update of a critic: run.{' or run.'.join(critics)}"
            )
        update.take()

    def sync(self) -> Awaitable[None]:
        """Send the weights of updated policies to their engines, if these engines will be used for
        sampling or validation.
        """
        run = self._run
        step = run.open_step("sync()")
        return Pending(run, "sync()", lambda: run.bring_to_engines(step))

    def record(self, **values: float) -> None:
        """Add numbers computed by the flow to this step's metrics, as flow/NAME."""
        step = self._run.open_step("record(...)")
        for name, value in values.items():
            if not _METRIC.fullmatch(name):
                raise FlowError(
                    f"record(...): {name!r} is not a valid metric name; use letters and _"
                )
            number = _number(value)
            if number is None or not np.isfinite(number):
                raise FlowError(
                    f"step {step}: record({name}=...) must be a finite number, got {value!r:.80}"
                )
            self._run.metrics[f"flow/{name}"] = number


def _number(value: object) -> float | None:
    """Return a number, or an array or tensor with one element, as a float; None for anything
    else."""
    if isinstance(value, numbers.Real):
        return float(value)
    try:
        return float(np.asarray(value).astype(np.float64, casting="same_kind").item())
    except (TypeError, ValueError, RuntimeError):
        return None


class Steps(AsyncIterator[int]):
    """An async iterator over step numbers. Not a generator, because an abandoned generator is
    finalized only by garbage collection.
    """

    def __init__(self, run: FollowedRun) -> None:
        self._run = run

    async def __anext__(self) -> int:
        with self._run.calling():
            return await self._run.next_step(self)

    def __iter__(self) -> NoReturn:
        raise FlowError("steps() is an async iterator; write `async for step in run.steps():`")
