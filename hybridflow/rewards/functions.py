"""Scoring of rows by the custom function in `reward.path` or by the verifier for each row's data
source.

A row consists of JSON values: (data_source, response text, ground truth, extra_info). An outcome is
`{"score": s, "extra": {...}}`, or `{"failure": text}` if the function raised or returned an invalid
value.
"""

from __future__ import annotations

import asyncio
import fnmatch
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hybridflow.config.registry import attribute_of, describe_error, import_file
from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, did_you_mean
from hybridflow.rewards.combination import Combination
from hybridflow.rewards.verifiers.base import (
    FACTS,
    PROMPT,
    THINKING_OPEN,
    TIMEOUT,
    Verifier,
    by_data_source,
    check_installed,
    result_of,
    shown,
)

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
GROUP_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_ALARMS = (
    (signal.ITIMER_REAL, signal.SIGALRM),
    (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    (signal.ITIMER_PROF, signal.SIGPROF),
)
Row = Sequence[Any]
Outcome = dict[str, Any]


class Scoring:
    """Loads and calls the function or verifiers configured in the `reward` section.

    A function that takes data_sources, solution_strs, ground_truths and extra_infos is called once
    for all samples of a prompt and returns a list; other functions are called per row. Both may be
    async.

    Raises:
        ConfigError: the function or a verifier cannot be loaded or called, or no verifier accepts
            a key of `reward.kwargs`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._kwargs = dict(config.kwargs)
        if config.path is not None and config.combine:
            raise ConfigError(
                f"reward.combine={dict(config.combine)} cannot be used with "
                f"reward.path={config.path}, because that function scores every row; remove one of "
                "the two (reward.combine also accepts functions, as path/to/file.py:name)"
            )
        self._function = None if config.path is None else load_function(config)
        self._verifiers: Mapping[str, Verifier] = {}
        if config.combine:
            self._verifiers = {"*": Combination.of(config.combine)}
        elif self._function is None:
            self._verifiers = by_data_source(config.verifiers)
        self.by_group = self._function is not None and takes_groups(self._function)
        # default verifiers only compute; verifiers that wait for a server are set in reward.combine
        self.is_async = inspect.iscoroutinefunction(self._function) or any(
            verifier.is_async for verifier in self._verifiers.values()
        )
        facts = [verifier.facts for verifier in self._verifiers.values()]
        self.facts: set[str] = set().union(*facts) if self._function is None else {THINKING_OPEN}
        options: set[str] = set().union(*(one.options for one in self._verifiers.values()))
        for key in self._kwargs if self._function is None else ():
            if key not in options:
                raise ConfigError(
                    f"reward.kwargs.{key} is not an option of any verifier (their options: "
                    f"{', '.join(sorted(options))})"
                )
        missing = self._verifiers["*"].needed - self._kwargs.keys() if config.combine else set()
        if missing:
            keys = ", ".join(f"reward.kwargs.{name}" for name in sorted(missing))
            raise ConfigError(f"reward.combine={dict(config.combine)} requires {keys}")

    @property
    def sources(self) -> list[str] | None:
        """The data sources that have a verifier (names may end in `*`); None if a function scores
        all rows."""
        return None if self._function else sorted(self._verifiers)

    def runs_in_driver(self, source: str) -> bool:
        """Return True if rows from this data source can be scored in the driver
        (`Verifier.runs_in_driver`)."""
        return self._function is None and self._verifier(source).runs_in_driver

    def check_installed(self, source: str) -> None:
        """Raise a ConfigError if the verifier for this data source imports a package that is not
        installed."""
        if self._function is None:
            check_installed(self._verifier(source), f"the verifier of data_source {source!r}")

    def outcomes(self, rows: Sequence[Row]) -> list[Outcome]:
        """Score the rows of one call: a single row, or the rows of a group. For a row without a
        response (None), only the ground truth is checked. Must be called outside an event loop,
        because the function may start its own.
        """
        if rows[0][1] is None:
            return self.truths(rows)
        # verifiers that only compute set no alarms, and most rows have one of them
        with nullcontext() if self.runs_in_driver(rows[0][0]) else leaving_no_alarm():
            try:
                found = self._call(rows)
                if inspect.isawaitable(found):
                    found = asyncio.run(_awaited(found))
            except (Exception, SystemExit) as error:
                return self._failed(rows, error)
        return self._checked(rows, found)

    async def outcomes_while_others_wait(self, rows: Sequence[Row]) -> list[Outcome]:
        """Async version of `outcomes`, for async functions. Call it within an event loop."""
        if rows[0][1] is None:
            return self.truths(rows)
        try:
            found = self._call(rows)
            if inspect.isawaitable(found):
                found = await found
        except (Exception, SystemExit) as error:
            return self._failed(rows, error)
        return self._checked(rows, found)

    def truths(self, rows: Sequence[Row]) -> list[Outcome]:
        """Check the ground truths of rows without a response. Returns a failure outcome for each
        invalid ground truth and {} for each valid one."""
        return [self._truth(str(source), truth) for source, _, truth, _ in rows]

    def _truth(self, source: str, ground_truth: Any) -> Outcome:
        if self._function is None:
            try:
                self._verifier(source).check_truth(ground_truth)
            except ValueError as error:
                return {"failure": str(error)}
        return {}

    def _failed(self, rows: Sequence[Row], error: BaseException) -> list[Outcome]:
        function = self._function or self._verifier(rows[0][0]).function
        try:
            file = inspect.getfile(function)
        except TypeError:  # a callable object
            file = str(self._config.path)
        how = (
            "raised"
            if self._function or self.is_async
            else f"cannot use ground truth {shown(rows[0][2])}:"
        )
        return [
            {"failure": f"{self._subject(row)} {how} {describe_error(error, Path(file))}"}
            for row in rows
        ]

    def _checked(self, rows: Sequence[Row], found: Any) -> list[Outcome]:
        if not self.by_group:
            found = [found]
        elif not isinstance(found, Sequence) or len(found) != len(rows):
            said = (
                f"{self._subject(rows[0])} returned {shown(found)}; expected a list of {len(rows)} "
                "scores"
            )
            return [{"failure": said} for _ in rows]
        weight = self._config.weight
        return [
            checked(self._subject(row), value, weight)
            for row, value in zip(rows, found, strict=True)
        ]

    def _call(self, rows: Sequence[Row]) -> Any:
        if self._function is None:
            verifier = self._verifier(rows[0][0])
            limit = self._config.timeout_s if self._config.processes != 0 else None
            info = rows[0][3]
            facts = {name: info[name] for name in FACTS if name in info}
            options = {**self._kwargs, PROMPT: "", **facts, TIMEOUT: limit}
            return verifier.function(rows[0][1], rows[0][2], **verifier.given(options))
        copies = [(source, text, truth, dict(info)) for source, text, truth, info in rows]
        if self.by_group:
            columns = [list(column) for column in zip(*copies, strict=True)]
            return self._function(
                **dict(zip(GROUP_ARGUMENTS, columns, strict=True)), **self._kwargs
            )
        return self._function(**dict(zip(ARGUMENTS, copies[0], strict=True)), **self._kwargs)

    def _subject(self, row: Row) -> str:
        if self._function is None:
            return f"the verifier of data_source {row[0]!r}"
        return f"reward function {self._config.name} of {self._config.path}"

    def _verifier(self, source: str) -> Verifier:
        return self._verifiers[str(matching(source, self._verifiers))]


def matching(source: str, known: Mapping[str, Any] | Sequence[str]) -> str | None:
    """Return the entry of `known` that matches a data source: the entry of the same name, or the
    longest matching pattern that ends in `*`."""
    if source in known:
        return source
    patterns = [
        name for name in known if name.endswith("*") and fnmatch.fnmatchcase(str(source), name)
    ]
    return max(patterns, key=len, default=None)


def unknown_source(source: str, known: Sequence[str]) -> str:
    """Return the error message for a data source without a verifier."""
    hint = did_you_mean(str(source), known)
    return (
        f"no verifier for data_source {source!r}{hint} (known: {', '.join(known)}); add your own "
        "to reward.verifiers, or set reward.path to a function for all rows"
    )


def takes_groups(function: Callable[..., Any]) -> bool:
    """Return True if a function accepts all rows of a prompt in a single call."""
    return set(GROUP_ARGUMENTS) <= set(inspect.signature(function).parameters)


def load_function(config: RewardConfig) -> Callable[..., Any]:
    """Load the function `reward.name` from `reward.path`. It may be sync or async, per row or per
    group.

    Raises:
        ConfigError: the file is missing or fails to import, does not define the function, or the
            function does not accept data_source, solution_str, ground_truth and extra_info (or the
            group  arguments) and the keys of reward.kwargs.
    """
    module = import_file(Path(str(config.path)), "reward.path")
    function: Callable[..., Any] = attribute_of(
        module, config.name, "reward.name", callable, "a function"
    )
    arguments = GROUP_ARGUMENTS if takes_groups(function) else ARGUMENTS
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{config.path}: {config.name}{inspect.signature(function)} cannot be called with "
            f"the keyword arguments {', '.join([*arguments, *config.kwargs])}: {error}"
        ) from error
    return function


def checked(who: str, found: Any, weight: float = 1.0) -> Outcome:
    """Convert the return value of a function or verifier to an outcome. `who` is the subject of the
    failure message."""
    try:
        result = result_of(found, weight)
    except ValueError as error:
        return {"failure": f"{who} returned {error}"}
    return {"score": result.score, "extra": result.extra}


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


@contextmanager
def leaving_no_alarm() -> Iterator[None]:
    """Context manager that disarms timers left running by a call and restores signal handlers
    replaced by it, so that a late alarm does not interrupt another call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: (signal.getsignal(number), signal.getitimer(timer)[0]) for timer, number in _ALARMS
    }
    try:
        yield
    finally:
        for timer, number in _ALARMS:
            handler, seconds = before[number]
            if not seconds and signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
