"""What a verifier is given and returns, and how one is registered for the data sources whose rows it scores.

A built-in verifier is a file of this package that bears its name; one of a user's is named in `reward.verifiers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.keys import VERIFIER
from hybridflow.config.registry import Registry


@dataclass(frozen=True)
class ScoreResult:
    """The score of one response and whatever else is worth recording about it.

    Attributes:
        score: the reward; finite.
        extra: more values by name, e.g. the parsed answer. They go into rollout dumps; numbers go into metrics and the
            report as well. None of them enters the advantage.
        failure: why there is no score, where the function hung, raised or returned nonsense; the score is 0 then.
    """

    score: float
    extra: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Verifier:
    """Compares the text of a response with the ground truth of its row.

    Attributes:
        function: (response, ground_truth, *, options) -> a score, a dict with one under "score", or a `ScoreResult`.
        data_sources: the values of the column data_source whose rows it scores.
        runs_in_driver: whether it takes microseconds and cannot hang, so that rows need no process and no deadline.
    """

    function: Callable[..., Any]
    data_sources: tuple[str, ...]
    runs_in_driver: bool = False

    @property
    def options(self) -> set[str]:
        """Names of the function's keyword-only arguments, which `reward.kwargs` may give."""
        parameters = inspect.signature(self.function).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


VERIFIERS: Registry[Verifier] = Registry(VERIFIER.kind, VERIFIER.package, "reward.verifiers")


def verifier(
    name: str, *, data_sources: Sequence[str], runs_in_driver: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the verifier of these data sources; see `Verifier` for the arguments."""

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        VERIFIERS.register(name, Verifier(function, tuple(data_sources), runs_in_driver))
        return function

    return registered


def by_data_source(own: Sequence[str] = ()) -> dict[str, Verifier]:
    """{data source: its verifier}, built-in ones and those of `own` (`path/to/file.py:name`), which win.

    Raises:
        ConfigError: a file of `own` cannot be imported, or registers no such verifier.
    """
    entries = [VERIFIERS.get(name) for name in (*VERIFIERS.names(), *own)]
    return {source: entry for entry in entries for source in entry.data_sources}
