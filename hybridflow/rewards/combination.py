"""Several verifiers that judge every response, each with a weight (`reward.combine`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.verifiers.base import VERIFIERS, ScoreResult, Verifier, check_installed, result_of


@dataclass(frozen=True)
class Combination(Verifier):
    """The weighted sum of the scores of `parts`, {name: (verifier, weight)}, for rows of any data source.

    What a verifier returns beside its score is recorded, and its score under its name: `gdpo` normalises these apart.
    """

    parts: Mapping[str, tuple[Verifier, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Mapping[str, Any]) -> Combination:
        """Verifiers by name, or `path/to/file.py:name`.

        Raises:
            ConfigError: there is no such verifier, or a weight is not a number.
        """
        parts = {}
        for name, weight in weights.items():
            if type(weight) not in (int, float):
                raise ConfigError(f"reward.combine.{name}={weight!r}: the weight of a verifier is a number")
            try:
                entry = VERIFIERS.get(str(name))
            except ConfigError as error:
                raise ConfigError(f"reward.combine: {error}") from error
            check_installed(entry, f"reward.combine.{name}")
            parts[str(name).rpartition(":")[2]] = (entry, float(weight))

        async def combined(response: str, ground_truth: Any, **options: Any) -> ScoreResult:
            score, extra = 0.0, dict[str, Any]()
            for name, (one, weight) in parts.items():
                answer = one.function(response, ground_truth, **one.given(options))
                found = result_of(await answer if inspect.isawaitable(answer) else answer)
                score += weight * found.score
                extra |= {**found.extra, name: found.score}
            return ScoreResult(score, extra)

        in_driver = all(one.runs_in_driver for one, _ in parts.values())
        return cls(combined, ("*",), in_driver, parts=parts)

    @property
    def options(self) -> set[str]:
        """The options of all parts."""
        return {option for one, _ in self.parts.values() for option in one.options}

    @property
    def needed(self) -> set[str]:
        """The options that a part cannot do without."""
        return {option for one, _ in self.parts.values() for option in one.needed}

    @property
    def reads_prompt(self) -> bool:
        """Whether a part wants the text of the row's prompt."""
        return any(one.reads_prompt for one, _ in self.parts.values())

    @property
    def is_async(self) -> bool:
        """Whether a part waits for something. The parts of one row are asked one after another."""
        return any(one.is_async for one, _ in self.parts.values())
