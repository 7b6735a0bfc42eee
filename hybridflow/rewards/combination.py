"""A weighted combination of several verifiers that score every response (`reward.combine`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.verifiers.base import (
    VERIFIERS,
    ScoreResult,
    Verifier,
    check_installed,
    result_of,
)


@dataclass(frozen=True)
class Combination(Verifier):
    """The weighted sum of the scores of `parts`, {name: (verifier, weight)}, used for rows from
    every data source.

    The score and extra values of each part are recorded under its name, so that `gdpo` can
    normalise the parts separately.
    """

    parts: Mapping[str, tuple[Verifier, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Mapping[str, Any]) -> Combination:
        """Combine the verifiers in `weights`, which maps names (or `path/to/file.py:name`) to
        weights.

        Raises:
            ConfigError: a verifier does not exist, or a weight is not a number.
        """
        parts = {}
        for name, weight in weights.items():
            if type(weight) not in (int, float):
                raise ConfigError(
                    f"reward.combine.{name}={weight!r}: a verifier's weight must be a number"
                )
            try:
                entry = VERIFIERS.get(str(name))
            except ConfigError as error:
                raise ConfigError(f"reward.combine: {error}") from error
            check_installed(entry, f"reward.combine.{name}")
            parts[str(name).rpartition(":")[2]] = (entry, float(weight))

        def add(found: Mapping[str, Any]) -> ScoreResult:
            score = 0.0
            extra = dict[str, Any]()
            for name, (_, weight) in parts.items():
                one = result_of(found[name])
                score += weight * one.score
                extra |= {**one.extra, name: one.score}
            return ScoreResult(score, extra)

        def answers(response: str, ground_truth: Any, options: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: one.function(response, ground_truth, **one.given(options))
                for name, (one, _) in parts.items()
            }

        def combined(response: str, ground_truth: Any, **options: Any) -> ScoreResult:
            return add(answers(response, ground_truth, options))

        async def awaited(response: str, ground_truth: Any, **options: Any) -> ScoreResult:
            found = answers(response, ground_truth, options)
            for name, one in found.items():
                if inspect.isawaitable(one):
                    found[name] = await one
            return add(found)

        waits = any(one.is_async for one, _ in parts.values())
        in_driver = all(one.runs_in_driver for one, _ in parts.values())
        return cls(awaited if waits else combined, ("*",), in_driver, parts=parts)

    @property
    def options(self) -> set[str]:
        """Names of the options of all parts."""
        return set().union(*(one.options for one, _ in self.parts.values()))

    @property
    def needed(self) -> set[str]:
        """Names of the options that at least one part requires."""
        return set().union(*(one.needed for one, _ in self.parts.values()))

    @property
    def facts(self) -> set[str]:
        """Names of the row facts that at least one part accepts as arguments."""
        return set().union(*(one.facts for one, _ in self.parts.values()))

    def check_truth(self, ground_truth: Any) -> None:
        """Raise ValueError if the ground truth is invalid for at least one part."""
        for one, _ in self.parts.values():
            one.check_truth(ground_truth)

    @property
    def is_async(self) -> bool:
        """True if any part is async. All parts score a row one after another."""
        return any(one.is_async for one, _ in self.parts.values())
