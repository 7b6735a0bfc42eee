"""`RewardManager`: scores a batch of responses with the built-in verifier of each row's data source or with the user's
function."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards.custom import describe_error, load_function
from hybridflow.rewards.verifiers import VERIFIERS, ScoreResult, Verifier


class RewardManager:
    """Built once from the `reward` section; a wrong path, name or argument is reported then.

    Without `reward.path` each row is scored by the verifier of its data source, and `reward.kwargs` go to the verifiers
    that take them. With `reward.path` the function of that file scores every row: it is called by keyword with
    data_source, solution_str, ground_truth, extra_info and `reward.kwargs`, and returns a float or a dict with "score".
    It may be async; then the calls of a batch run concurrently (do not call `score` from inside a running event loop in
    that case).

    Raises:
        ConfigError: the custom function cannot be loaded or called, or no verifier takes a key of `reward.kwargs`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._kwargs = dict(config.kwargs)
        self._path = None if config.path is None else Path(config.path)
        self._name = config.name
        self._function = None if config.path is None else load_function(config)
        if self._function is None:
            accepted = {key for verifier in VERIFIERS.values() for key in _keywords(verifier)}
            for key in self._kwargs:
                if key not in accepted:
                    raise ConfigError(
                        f"reward.kwargs.{key} is taken by no built-in verifier (they take: "
                        f"{', '.join(sorted(accepted))})"
                    )

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Raises DataError when a data source has no verifier: call it with the dataset's sources before the first
        rollout."""
        if self._function is None:
            for source in dict.fromkeys(data_sources):
                _verifier_of(source)

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
            DataError: no verifier for a data source; the custom function raised, or returned neither a finite number
            nor a dict with
                one under "score". Names the row of the batch, and for a custom function its file, name and line.
            ValueError: the arguments have different lengths.
        """
        infos = [{}] * len(response_text) if extra_info is None else extra_info
        rows = list(zip(data_source, response_text, ground_truth, infos, strict=True))
        if self._function is None:
            return [self._verify(i, source, text, truth) for i, (source, text, truth, _) in enumerate(rows)]
        calls = [
            {
                "data_source": source,
                "solution_str": text,
                "ground_truth": truth,
                "extra_info": dict(info),
                **self._kwargs,
            }
            for source, text, truth, info in rows
        ]
        if inspect.iscoroutinefunction(self._function):
            outcomes = asyncio.run(self._await_all(calls))
        else:
            outcomes = [self._call(i, call) for i, call in enumerate(calls)]
        return [self._checked(i, outcome) for i, outcome in enumerate(outcomes)]

    def _verify(self, row: int, source: str, text: str, truth: Any) -> ScoreResult:
        verifier = _verifier_of(source, f"row {row}: ")
        accepted = _keywords(verifier)
        try:
            return verifier(text, truth, **{key: value for key, value in self._kwargs.items() if key in accepted})
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"row {row}: the verifier of data_source {source!r} cannot use ground truth {truth!r}: {error}"
            ) from error

    def _call(self, row: int, arguments: dict[str, Any]) -> Any:
        assert self._function is not None
        try:
            return self._function(**arguments)
        except Exception as error:
            raise self._user_error(row, error) from error

    async def _await_all(self, calls: list[dict[str, Any]]) -> list[Any]:
        assert self._function is not None
        outcomes = await asyncio.gather(*(self._function(**call) for call in calls), return_exceptions=True)
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                raise self._user_error(row, outcome) from outcome
        return outcomes

    def _user_error(self, row: int, error: Exception) -> DataError:
        assert self._path is not None
        return DataError(
            f"row {row}: reward function {self._name} of {self._path} raised {describe_error(error, self._path)}"
        )

    def _checked(self, row: int, outcome: Any) -> ScoreResult:
        """The outcome of the custom function as a ScoreResult."""
        extra: dict[str, Any] = {}
        score = outcome
        if isinstance(outcome, Mapping):
            extra = {str(key): value for key, value in outcome.items() if key != "score"}
            score = outcome.get("score")
        # numbers.Real also covers bool and numpy scalars.
        if not isinstance(score, numbers.Real) or not math.isfinite(score):
            raise DataError(
                f"row {row}: reward function {self._name} of {self._path} returned {str(outcome)[:120]!r}; "
                'expected a finite number or a dict with one under "score"'
            )
        return ScoreResult(float(score), extra)


def _verifier_of(source: str, where: str = "") -> Verifier:
    verifier = VERIFIERS.get(source)
    if verifier is None:
        close = difflib.get_close_matches(str(source), VERIFIERS, n=1)
        did_you_mean = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(
            f"{where}no built-in verifier for data_source {source!r}{did_you_mean} (known: "
            f"{', '.join(sorted(VERIFIERS))}); "
            "give a function of your own in reward.path"
        )
    return verifier


def _keywords(verifier: Verifier) -> set[str]:
    """Names of the keyword-only arguments of a built-in verifier."""
    return {
        name
        for name, parameter in inspect.signature(verifier).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
