"""`RewardManager`: scores a batch of responses with the verifier of each row's data source or with the user's
function."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.registry import attribute_of, describe_error, import_file
from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards.verifiers.base import ScoreResult, Verifier, by_data_source

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class RewardManager:
    """Built once from the `reward` section; a wrong path, name or argument is reported then.

    Without `reward.path` each row is scored by the verifier of its data source, a built-in one or one of
    `reward.verifiers`, and `reward.kwargs` go to the verifiers that take them. With `reward.path` the function of that
    file scores every row: it is called by keyword with data_source, solution_str, ground_truth, extra_info and
    `reward.kwargs`, and returns a float or a dict with "score". It may be async; then the calls of a batch run
    concurrently (do not call `score` from inside a running event loop in that case).

    Raises:
        ConfigError: the function or a verifier cannot be loaded or called, or no verifier takes a key of
            `reward.kwargs`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._kwargs, self._config = dict(config.kwargs), config
        self._function = None if config.path is None else load_function(config)
        self._verifiers = {} if self._function else by_data_source(config.verifiers)
        options = {name for verifier in self._verifiers.values() for name in verifier.options}
        for key in self._kwargs if self._function is None else ():
            if key not in options:
                raise ConfigError(
                    f"reward.kwargs.{key} is taken by no verifier (they take: {', '.join(sorted(options))})"
                )

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Raises DataError when a data source has no verifier: call it with the dataset's sources before the first
        rollout."""
        if self._function is None:
            for source in dict.fromkeys(data_sources):
                self._verifier_of(source)

    def score(
        self,
        data_source: Sequence[str],
        response_text: Sequence[str],
        ground_truth: Sequence[Any],
        extra_info: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[ScoreResult]:
        """Scores of B responses, in order.

        Args:
            data_source: [B] which verifier each row wants.
            response_text: [B] text up to, not with, the end token.
            ground_truth: [B] as in the dataset.
            extra_info: [B] as in the dataset; None stands for empty ones.

        Raises:
            DataError: no verifier for a data source; the verifier or function raised (or tried to end the process), or
                returned neither a finite number nor a dict with one under "score". Names the row of the batch, and for
                a custom function its file, name and line.
            ValueError: the arguments have different lengths.
        """
        infos = [{}] * len(response_text) if extra_info is None else extra_info
        rows = list(zip(data_source, response_text, ground_truth, infos, strict=True))
        if self._function is None:
            return [self._verify(i, source, text, truth) for i, (source, text, truth, _) in enumerate(rows)]
        calls = [
            dict(zip(ARGUMENTS, (source, text, truth, dict(info)), strict=True)) | self._kwargs
            for source, text, truth, info in rows
        ]
        if inspect.iscoroutinefunction(self._function):
            outcomes = asyncio.run(self._await_all(calls))
        else:
            outcomes = [self._call(self._function, call) for call in calls]
        who = f"reward function {self._config.name} of {self._config.path}"
        return [
            _checked(f"row {i}: {who}", outcome, Path(str(self._config.path))) for i, outcome in enumerate(outcomes)
        ]

    def _verify(self, row: int, source: str, text: str, truth: Any) -> ScoreResult:
        verifier = self._verifier_of(source, f"row {row}: ")
        options = {key: value for key, value in self._kwargs.items() if key in verifier.options}
        outcome = self._call(lambda: verifier.function(text, truth, **options), {})
        if isinstance(outcome, BaseException):
            raise DataError(
                f"row {row}: the verifier of data_source {source!r} cannot use ground truth {truth!r}: "
                f"{describe_error(outcome, Path(inspect.getfile(verifier.function)))}"
            ) from outcome
        return _checked(f"row {row}: the verifier of data_source {source!r}", outcome, Path())

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What the function returns, or the exception that it raised; sys.exit in it does not end the driver."""
        try:
            return function(**arguments)
        except (Exception, SystemExit) as error:
            return error

    async def _await_all(self, calls: list[dict[str, Any]]) -> list[Any]:
        async def one(call: dict[str, Any]) -> Any:
            assert self._function is not None
            try:
                return await self._function(**call)
            except (Exception, SystemExit) as error:
                return error

        return await asyncio.gather(*map(one, calls))

    def _verifier_of(self, source: str, where: str = "") -> Verifier:
        if source in self._verifiers:
            return self._verifiers[source]
        near = difflib.get_close_matches(str(source), self._verifiers, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{where}no verifier for data_source {source!r}{hint} (known: {', '.join(sorted(self._verifiers))}); give "
            "one of your own in reward.verifiers, or a function for all rows in reward.path"
        )


def load_function(config: RewardConfig) -> Callable[..., Any]:
    """The function `reward.name` of the file `reward.path`, sync or async.

    Raises:
        ConfigError: the file is missing or fails to import, has no such function, or the function does not take the
            arguments data_source, solution_str, ground_truth, extra_info and those of reward.kwargs.
    """
    module = import_file(Path(str(config.path)), "reward.path")
    function: Callable[..., Any] = attribute_of(module, config.name, "reward.name", callable, "a function")
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{config.path}: {config.name}{inspect.signature(function)} cannot be called with "
            f"{', '.join([*ARGUMENTS, *config.kwargs])} by name: {error}"
        ) from error
    return function


def _checked(who: str, outcome: Any, file: Path) -> ScoreResult:
    """What a function or verifier returned or raised as a ScoreResult; `who` begins the message of an error."""
    if isinstance(outcome, BaseException):
        raise DataError(f"{who} raised {describe_error(outcome, file)}") from outcome
    extra: dict[str, Any] = {}
    score = outcome
    if isinstance(outcome, ScoreResult):
        score, extra = outcome.score, outcome.extra
    if isinstance(outcome, Mapping):
        extra = {str(key): value for key, value in outcome.items() if key != "score"}
        score = outcome.get("score")
    # numbers.Real also covers bool and numpy scalars
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        raise DataError(
            f'{who} returned {str(outcome)[:120]!r}; expected a finite number or a dict with one under "score"'
        )
    return ScoreResult(float(score), extra)
