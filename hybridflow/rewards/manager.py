"""`RewardManager`: scores responses with the verifier of each row's data source or with the user's
function, in a pool of processes beside the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hybridflow.config.registry import is_user_entry
from hybridflow.config.schema import RewardConfig
from hybridflow.errors import DataError
from hybridflow.rewards.functions import Outcome, Row, Scoring, matching, unknown_source
from hybridflow.rewards.pool import RewardPool
from hybridflow.rewards.reading import DRIVER_CHARACTERS
from hybridflow.rewards.verifiers.base import PROMPT, THINKING_OPEN, ScoreResult

_TRUTHS = 4096  # ground truths that a process of the pool is asked about in one call


@dataclass(frozen=True)
class Submitted:
    """Rows that are being scored: for each call its number in the pool, or its rows where they are
    scored here as they are collected, and its rows' positions."""

    calls: Sequence[tuple[int | list[Row], list[int]]]


class RewardManager:
    """Built once from the `reward` section; what scores is loaded meanwhile, in the background.

    Without `reward.path` each row is scored by the verifier of its data source, a built-in one or
    one of `reward.verifiers`, and `reward.kwargs` go to the verifiers that take them. With
    `reward.path` the function of that file scores every row. Calls run in `reward.processes`
    processes, each with the deadline `reward.timeout_s`. Here run built-in verifiers that cannot
    hang, and with `reward.processes=0` all calls, without a deadline.

    Args:
        config: the `reward` section.
        log_path: where the processes print; None: with this process.

    Raises:
        ConfigError: with `reward.processes=0`, the function or a verifier cannot be loaded or
            called, or no verifier takes a key of `reward.kwargs`; otherwise the first other method
            that is called raises it.
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
        """Wait until what scores is loaded. Raises DataError when a data source has no verifier:
        call it with the dataset's sources before the first rollout. Raises ConfigError when its
        verifier lacks a package."""
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
        """Raise DataError for the first ground truth of these rows that its verifier cannot use,
        before anything starts; `places` [B] name the rows' files. Verifiers in a file of yours are
        asked in the pool."""
        rows: list[Row] = [
            (*row, {}) for row in zip(data_source, [None] * len(places), ground_truth, strict=True)
        ]
        if self._scoring is not None:
            outcomes = self._scoring.truths(rows)
        elif self.config.path is None:
            pool = self._started_pool()
            calls = [
                pool.submit(rows[begin : begin + _TRUTHS]) for begin in range(0, len(rows), _TRUTHS)
            ]
            outcomes = [outcome for call in asyncio.run(pool.collect(calls)) for outcome in call]
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
        """Scores of B responses, in order: `submit` and `collect`, for callers that are not in an
        event loop.

        Raises:
            DataError: no verifier for a data source; or `reward.on_failure` is "stop" and a row
                failed, or all rows failed. Names the first such row, and for a custom function its
                file, name and line.
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
        """Begin to score B responses; the caller may do something else meanwhile.

        Args:
            data_source: [B] which verifier each row wants.
            response_text: [B] text up to, not with, the end token.
            ground_truth: [B] as in the dataset.
            extra_info: [B] as in the dataset; None stands for empty ones.
            groups: [B] equal for the samples of a prompt, which a function of groups gets together;
                None: one group.

        Raises:
            DataError: no verifier for a data source, or a column holds values of a type that is not
                plain data.
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
                f"ground_truth or extra_info holds {error}; rewards are given plain data alone"
            ) from error
        return Submitted(begun)

    async def collect(self, parts: Sequence[Submitted]) -> list[list[ScoreResult]]:
        """The results of each part, in the order of its rows; waits for what is not finished. Calls
        that run here all begin together, as in a pool of one process."""
        calls = [call for part in parts for call, _ in part.calls]
        pooled = [call for call in calls if isinstance(call, int)]
        here = [call for call in calls if not isinstance(call, int)]
        made = iter(await _all(self._scoring, here) if here and self._scoring is not None else ())
        answers = (
            dict(zip(pooled, await self._pool.collect(pooled), strict=True))
            if self._pool is not None
            else {}
        )
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
        """Nobody collects these rows. What is being scored goes on, and is not kept."""
        if self._pool is not None:
            self._pool.forget([call for call, _ in submitted.calls if isinstance(call, int)])

    def check(self, results: Sequence[ScoreResult]) -> None:
        """Apply `reward.on_failure` to a whole batch: a reward that fails everywhere has a fault
        that no policy mends.

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
        """Whether extra_info is to have the text of the row's prompt under "prompt". Waits until
        what scores is loaded."""
        return PROMPT in self._facts

    @property
    def reads_thinking(self) -> bool:
        """Whether extra_info is to say under "thinking_open" if the row's prompt ends inside a
        thinking."""
        return THINKING_OPEN in self._facts

    @property
    def _facts(self) -> set[str]:
        self._loaded()
        return (self._scoring or self._started_pool()).facts

    def _loaded(self) -> tuple[list[str] | None, bool]:
        """The data sources with a verifier (None: a function scores all), and whether calls are by
        group."""
        if self._scoring is not None:
            return self._scoring.sources, self._scoring.by_group
        pool = self._started_pool()
        return pool.sources, pool.by_group

    def _runs_here(self, source: str, text: str) -> bool:
        """Whether the driver scores a text itself: with processes=0 each, else short ones whose
        verifier is quick."""
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
        """End the pool's processes."""
        if self._pool is not None:
            self._pool.close()


async def _all(scoring: Scoring, calls: Sequence[Sequence[Row]]) -> list[list[Outcome]]:
    if scoring.is_async:
        return list(await asyncio.gather(*map(scoring.outcomes_while_others_wait, calls)))
    with _no_running_loop():
        return [scoring.outcomes(rows) for rows in calls]


@contextmanager
def _no_running_loop() -> Iterator[None]:
    """Let a function of a user's run an event loop of its own (`asyncio.run`) while the driver's
    stands still."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
