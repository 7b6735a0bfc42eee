"""`RewardManager`: scores responses in a process pool, with the verifier for each row's data source
or with a custom function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

from hybridflow.config.registry import is_user_entry
from hybridflow.config.schema import RewardConfig
from hybridflow.errors import DataError
from hybridflow.rewards.functions import Outcome, Row, Scoring, matching, unknown_source
from hybridflow.rewards.pool import RewardPool
from hybridflow.rewards.reading import DRIVER_CHARACTERS
from hybridflow.rewards.verifiers.base import PROMPT, THINKING_OPEN, ScoreResult

_TRUTHS = 4096  # ground truths checked per call of the pool


@dataclass(frozen=True)
class Submitted:
    """Rows that are being scored. Each call is a pair: its number in the pool (or the rows
    themselves, if `collect` scores them in this process), and the positions of the rows in the
    batch.
    """

    calls: Sequence[tuple[int | list[Row], list[int]]]


class RewardManager:
    """Scores responses as configured by the `reward` section. The scoring code is loaded in the
    background.

    Without `reward.path`, each row is scored by the verifier for its data source, which is built-in
    or from `reward.verifiers` and receives the `reward.kwargs` that it accepts. With `reward.path`,
    the function in that file scores every row. Calls run in `reward.processes` processes, each
    limited to `reward.timeout_s`. Built-in verifiers that cannot hang run in this process. With
    `reward.processes=0`, all calls run in this process, without a time limit.

    Args:
        config: the `reward` section.
        log_path: log file of the processes; None uses the output of this process.

    Raises:
        ConfigError: with `reward.processes=0`, the function or a verifier cannot be loaded or
            called, or no verifier accepts a key of `reward.kwargs`. With other values, the first
            method call raises this error.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self.config = config
        self._log_path = log_path
        has_code_of_user = config.path is not None or any(
            map(is_user_entry, (*config.verifiers, *config.combine))
        )
        self._scoring = None if has_code_of_user and config.processes != 0 else Scoring(config)
        self._pool = RewardPool(config, log_path) if self._scoring is None else None

    def check_data_sources(self, data_sources: Iterable[str]) -> None:
        """Wait until the scoring code is loaded, and check that every data source has a verifier.
        Call this with the dataset's sources before the first rollout.

        Raises:
            DataError: a data source has no verifier.
            ConfigError: a package that a verifier needs is not installed.
        """
        known, _ = self._loaded()
        for source in dict.fromkeys(data_sources if known is not None else ()):
            if matching(source, known or ()) is None:
                raise DataError(unknown_source(source, known or ()))
            if self._scoring is not None:
                self._scoring.check_installed(source)
            if not self._runs_here(source, ""):
                self._started_pool()

    def check_truths(
        self, data_source: Sequence[str], ground_truth: Sequence[Any], places: Sequence[str]
    ) -> None:
        """Raise a DataError for the first ground truth that is invalid for its verifier.

        `places` [B] contains the file of each row, for the message. Verifiers from user files run
        in the pool.
        """
        rows: list[Row] = [
            (*row, {}) for row in zip(data_source, [None] * len(places), ground_truth, strict=True)
        ]
        if self._scoring is not None:
            outcomes = self._scoring.truths(rows)
        elif self.config.path is None:
            pool = self._started_pool()
            calls = []
            for begin in range(0, len(rows), _TRUTHS):
                calls.append(pool.submit(rows[begin : begin + _TRUTHS]))
            outcomes = list(chain.from_iterable(asyncio.run(pool.collect(calls))))
        else:
            return
        for source, place, outcome in zip(data_source, places, outcomes, strict=True):
            if problem := outcome.get("failure"):
                raise DataError(
                    f"{place}, column 'reward_model': {problem}; the verifier of data_source "
                    f"{source!r} cannot use it: correct the row, or name another verifier "
                    "(reward.verifiers, reward.combine)"
                )

    def score(
        self,
        data_source: Sequence[str],
        response_text: Sequence[str],
        ground_truth: Sequence[Any],
        extra_info: Sequence[Mapping[str, Any]] | None = None,
        groups: Sequence[Any] | None = None,
    ) -> list[ScoreResult]:
        """Score B responses and return the results in order. Equivalent to `submit` followed by
        `collect`, for callers outside an event loop.

        Raises:
            DataError: a data source has no verifier, a row failed and `reward.on_failure` is
                "stop", or all rows failed. The message names the first such row and, for a custom
                function, its file, name and line.
        """
        [results] = asyncio.run(
            self.collect(
                [self.submit(data_source, response_text, ground_truth, extra_info, groups)]
            )
        )
        self.check(results)
        return results

    def submit(
        self,
        data_source: Sequence[str],
        response_text: Sequence[str],
        ground_truth: Sequence[Any],
        extra_info: Sequence[Mapping[str, Any]] | None = None,
        groups: Sequence[Any] | None = None,
    ) -> Submitted:
        """Start scoring B responses without waiting for the results.

        Args:
            data_source: [B] selects the verifier for each row.
            response_text: [B] response text without the end token.
            ground_truth: [B] as in the dataset.
            extra_info: [B] as in the dataset; None means empty.
            groups: [B] the same value for all samples of a prompt, which a group function receives
                together; None means one group.

        Raises:
            DataError: a data source has no verifier, or a column contains values that are not plain
                data.
            ValueError: the arguments have different lengths.
        """
        infos = [{}] * len(response_text) if extra_info is None else extra_info
        rows: list[Row] = list(
            zip(data_source, response_text, ground_truth, map(dict, infos), strict=True)
        )
        known, by_group = self._loaded()
        for number, row in enumerate(rows if known is not None else ()):
            if matching(row[0], known or ()) is None:
                raise DataError(f"row {number}: {unknown_source(row[0], known or ())}")
        calls: dict[Any, list[int]] = {}
        for number in range(len(rows)):
            group = number if not by_group else 0 if groups is None else groups[number]
            calls.setdefault(group, []).append(number)
        picked = [([rows[number] for number in numbers], numbers) for numbers in calls.values()]
        begun: list[tuple[int | list[Row], list[int]]] = []
        try:
            for given, at in picked:
                begun.append(
                    (
                        given
                        if self._runs_here(*given[0][:2])
                        else self._started_pool().submit(given),
                        at,
                    )
                )
        except ValueError as error:
            raise DataError(
                f"ground_truth or extra_info contains {error}; rewards accept only plain data"
            ) from error
        return Submitted(begun)

    async def collect(self, parts: Sequence[Submitted]) -> list[list[ScoreResult]]:
        """Wait for the results. Returns one list per submitted part, in row order. Calls that run
        in this process are started together.
        """
        pooled: list[int] = []
        here: list[list[Row]] = []
        for part in parts:
            for call, _ in part.calls:
                if isinstance(call, int):
                    pooled.append(call)
                else:
                    here.append(call)
        made = iter(await _all(self._scoring, here) if here and self._scoring is not None else ())
        answers = {}
        if self._pool is not None:
            answers = dict(zip(pooled, await self._pool.collect(pooled), strict=True))
        results: list[list[ScoreResult]] = []
        for part in parts:
            found: dict[int, ScoreResult] = {}
            for call, numbers in part.calls:
                for number, outcome in zip(
                    numbers, answers[call] if isinstance(call, int) else next(made), strict=True
                ):
                    found[number] = ScoreResult(
                        outcome.get("score", 0.0), outcome.get("extra", {}), outcome.get("failure")
                    )
            results.append([found[number] for number in range(len(found))])
        return results

    def forget(self, submitted: Submitted) -> None:
        """Discard these rows without collecting their scores. Running calls finish, and their
        results are dropped."""
        if self._pool is not None:
            self._pool.forget([call for call, _ in submitted.calls if isinstance(call, int)])

    def check(self, results: Sequence[ScoreResult]) -> None:
        """Apply `reward.on_failure` to a whole batch. If every row failed, the bug is in the reward
        function, so always stop.

        Raises:
            DataError: a row failed and `reward.on_failure` is "stop", or all rows failed.
        """
        failed = [
            (number, result.failure) for number, result in enumerate(results) if result.failure
        ]
        if failed and (self.config.on_failure == "stop" or len(failed) == len(results)):
            number, text = failed[0]
            more = f" ({len(failed)} of {len(results)} rows failed)" if len(results) > 1 else ""
            raise DataError(f"row {number}: {text}{more}")

    @property
    def reads_prompt(self) -> bool:
        """True if extra_info must contain the text of the prompt under "prompt". Waits for the
        scoring code to load."""
        return PROMPT in self._facts

    @property
    def reads_thinking(self) -> bool:
        """True if extra_info must contain "thinking_open", which indicates whether the prompt ends
        inside a thinking block."""
        return THINKING_OPEN in self._facts

    @property
    def _facts(self) -> set[str]:
        self._loaded()
        return (self._scoring or self._started_pool()).facts

    def _loaded(self) -> tuple[list[str] | None, bool]:
        """Return the data sources that have a verifier (None if a function scores all rows), and
        whether the function is called per group.
        """
        if self._scoring is not None:
            return self._scoring.sources, self._scoring.by_group
        pool = self._started_pool()
        return pool.sources, pool.by_group

    def _runs_here(self, source: str, text: str) -> bool:
        """Return True if this process scores the text itself: always if `reward.processes` is 0,
        otherwise only short texts with a fast verifier.
        """
        quick = len(text) <= DRIVER_CHARACTERS
        return self._scoring is not None and (
            self.config.processes == 0 or (quick and self._scoring.runs_in_driver(source))
        )

    def _started_pool(self) -> RewardPool:
        if self._pool is None:
            self._pool = RewardPool(self.config, self._log_path)
        self._pool.start()
        return self._pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the pool's processes."""
        if self._pool is not None:
            self._pool.close()


async def _all(scoring: Scoring, calls: Sequence[Sequence[Row]]) -> list[list[Outcome]]:
    if scoring.is_async:
        return list(await asyncio.gather(*map(scoring.outcomes_while_others_wait, calls)))
    with _no_running_loop():
        return list(map(scoring.outcomes, calls))


@contextmanager
def _no_running_loop() -> Iterator[None]:
    """Context manager that allows a custom function to run its own event loop (`asyncio.run`) while
    the driver's event loop is blocked."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
