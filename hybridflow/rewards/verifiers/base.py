"""What a verifier is given and returns, and how one is registered for the data sources whose rows
it scores.

A built-in verifier is a file of this package that bears its name; one of a user's is named in
`reward.verifiers`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.keys import VERIFIER
from hybridflow.config.registry import Registry
from hybridflow.errors import ConfigError
from hybridflow.rewards.scores import checked_score

# the argument of a verifier, and the entry of extra_info, that is the text of the row's prompt
PROMPT = "prompt"
# the same for whether this text ends inside a thinking, with which the response then begins; None:
# not known
THINKING_OPEN = "thinking_open"
# the argument that is the deadline of the call, `reward.timeout_s`; None: none
TIMEOUT = "timeout_s"
FACTS = {PROMPT, THINKING_OPEN, TIMEOUT}  # of a row or a call: arguments that are no options


@dataclass(frozen=True)
class ScoreResult:
    """The score of one response and whatever else is worth recording about it.

    Attributes:
        score: the reward; finite.
        extra: more values by name, e.g. the parsed answer. They go into rollout dumps; numbers go
            into metrics and the report as well. None of them enters the advantage.
        failure: why there is no score, where the function hung, raised or returned nonsense; the
            score is 0 then.
    """

    score: float
    extra: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Verifier:
    """Compares the text of a response with the ground truth of its row.

    Attributes:
        function: (response, ground_truth, *, options) -> a score, a dict with one under "score", or
            a `ScoreResult`. It may be async. Arguments named as in `FACTS` are told about the row
            and the call.
        data_sources: the values of the column data_source whose rows it scores.
        runs_in_driver: whether it takes microseconds and cannot hang, so that rows need no process
            and no deadline.
        requires: a package that it imports, and that an installation may lack; None: none.
        truth: reads a ground truth, and raises ValueError for one that the verifier cannot use;
            every row's is tried before a run starts. None: all are taken.
    """

    function: Callable[..., Any]
    data_sources: tuple[str, ...]
    runs_in_driver: bool = False
    requires: str | None = None
    truth: Callable[[Any], object] | None = None

    @property
    def options(self) -> set[str]:
        """Names of the function's keyword-only arguments, which `reward.kwargs` may give."""
        return self._keywords() - FACTS

    @property
    def facts(self) -> set[str]:
        """The `FACTS` that the function wants to know."""
        return self._keywords() & FACTS

    @property
    def needed(self) -> set[str]:
        """Names of the options that have no default."""
        parameters = inspect.signature(self.function).parameters
        return {
            name for name in self.options if parameters[name].default is inspect.Parameter.empty
        }

    def check_truth(self, ground_truth: Any) -> None:
        """Raise ValueError for a ground truth that cannot be used."""
        if self.truth is not None:
            self.truth(ground_truth)

    @property
    def is_async(self) -> bool:
        """Whether the function waits for something, so that a process may have many calls in
        flight."""
        return inspect.iscoroutinefunction(self.function)

    def given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Pick what the function takes from these options, among which `FACTS` may be."""
        taken = self.options | self.facts
        return {name: value for name, value in options.items() if name in taken}

    def _keywords(self) -> set[str]:
        parameters = inspect.signature(self.function).parameters.values()
        return {
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        }


def result_of(found: Any, weight: float = 1.0) -> ScoreResult:
    """What a verifier returned (a score, a mapping with one under "score", or a result) as a
    result.

    Raises:
        ValueError: there is no score that is finite in float32, also times `weight`.
    """
    score, extra = checked_score(
        {**found.extra, "score": found.score} if isinstance(found, ScoreResult) else found, weight
    )
    return ScoreResult(score, extra)


def text_truth(ground_truth: Any) -> str:
    """A ground truth that is a text or a number, as text: 72 and 72.0 are "72".

    Raises:
        ValueError: it is neither.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, (int, float)) and not isinstance(ground_truth, bool):
        whole = isinstance(ground_truth, float) and ground_truth.is_integer()
        return str(int(ground_truth)) if whole else str(ground_truth)
    raise ValueError(f"the ground truth {ground_truth!r} is neither a text nor a number")


def check_installed(entry: Verifier, what: str) -> None:
    """Raise ConfigError when the package that a verifier imports is not installed; `what` names the
    verifier."""
    if entry.requires is not None and importlib.util.find_spec(entry.requires) is None:
        package = entry.requires.replace("_", "-")
        raise ConfigError(
            f"{what} needs the python package {package}, which is not installed; install it (pip "
            f"install {package}), or give a verifier of your own in reward.verifiers"
        )


VERIFIERS: Registry[Verifier] = Registry(VERIFIER.kind, VERIFIER.package, "reward.verifiers")


def verifier(
    name: str,
    *,
    data_sources: Sequence[str],
    runs_in_driver: bool = False,
    requires: str | None = None,
    truth: Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the verifier of these data sources; see `Verifier` for the
    arguments."""
    return VERIFIERS.entry(
        name,
        lambda function: Verifier(function, tuple(data_sources), runs_in_driver, requires, truth),
    )


def by_data_source(own: Sequence[str] = ()) -> dict[str, Verifier]:
    """{data source: its verifier}, built-in ones and those of `own` (`path/to/file.py:name`), which
    win.

    Raises:
        ConfigError: a file of `own` cannot be imported, or registers no such verifier.
    """
    entries = [VERIFIERS.get(name) for name in (*VERIFIERS.names(), *own)]
    return {source: entry for entry in entries for source in entry.data_sources}
