"""The interface of a verifier, the decorator that registers verifiers for data sources, and the
validation of what reward functions return: a score that is finite in float32, and plain extra
values. All downstream code assumes that scores, `gdpo` parts and turn rewards are finite in
float32.

Each built-in verifier is defined in a file of the same name in this package. To add your own, list
them in `reward.verifiers`.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from hybridflow.config.keys import VERIFIER
from hybridflow.config.registry import Registry
from hybridflow.errors import ConfigError

# of float32's 3.4e38; leaves room for differences, sums and products with the group size
_MOST = 1e30
# extra values that are lists of numbers, one per turn or per token
PART_REWARDS = ("turn_rewards", "token_rewards")
# verifier argument and entry of extra_info: the text of the row's prompt
PROMPT = "prompt"
# likewise: whether that text ends inside a thinking block, where the response then starts; None:
# unknown
THINKING_OPEN = "thinking_open"
# verifier argument: the deadline of the call, `reward.timeout_s`; None: no deadline
TIMEOUT = "timeout_s"
FACTS = {PROMPT, THINKING_OPEN, TIMEOUT}  # arguments about a row or a call, not options
VERIFIERS: Registry[Verifier] = Registry(VERIFIER.kind, VERIFIER.package, "reward.verifiers")


def finite_number(value: Any, factor: float = 1.0) -> float | None:
    """Convert a number, boolean, scalar, 0-d array or 0-d tensor to float. Returns None for
    anything else, or if the absolute value of the number or its product with `factor` exceeds
    1e30."""
    if type(value) is float:  # of every row, and `isinstance` of an abstract class takes longer
        number = value
    else:
        # numpy and torch: `item` detaches and moves to the host
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, (numbers.Real, Decimal)):
            return None
        try:
            number = float(value)
        except (OverflowError, ValueError):
            return None
    return (
        number
        if math.isfinite(number) and max(abs(number), abs(number * factor)) <= _MOST
        else None
    )


def checked_score(found: Any, weight: float = 1.0) -> tuple[float, dict[str, Any]]:
    """Split a returned value, a score or a mapping with the key "score", into the score and the
    extra values.

    Args:
        weight: factor by which the score will be multiplied (`reward.weight`).

    Raises:
        ValueError: the score is missing, not finite or above 1e30 in magnitude, or the turn or
            token rewards are not lists of valid numbers.
    """
    extra: dict[str, Any] = {}
    score = found
    if isinstance(found, Mapping):
        extra = {str(key): value for key, value in found.items() if key != "score"}
        score = found.get("score")
    number = finite_number(score, weight)
    if number is None:
        raise ValueError(
            f"{shown(found)}; expected a finite number (at most 1e30, also after multiplication by "
            'reward.weight) or a dict with a "score"'
        )
    for name in PART_REWARDS:
        if name in extra:
            extra[name] = _part_rewards(name, extra[name], weight)
    return number, extra


def _part_rewards(name: str, values: Any, weight: float) -> list[float]:
    given = values.tolist() if hasattr(values, "tolist") else values
    found = []
    for value in given if isinstance(given, (list, tuple)) else [None]:
        number = None if value is None else finite_number(value, weight)
        if number is None:
            raise ValueError(f"{name}={shown(values)}; expected a list of finite numbers")
        found.append(number)
    return found


def shown(value: Any) -> str:
    """Return the beginning of a value's string form. Works even if the value's own methods
    raise."""
    try:
        return repr(str(value)[:120])
    except Exception as error:
        return f"a {type(value).__name__} that cannot be printed ({type(error).__name__})"


@dataclass(frozen=True)
class ScoreResult:
    """The score of a response, with extra values to record.

    Attributes:
        score: the reward; finite.
        extra: additional values keyed by name, e.g. the parsed answer. They are recorded in rollout
            dumps; numbers also appear in metrics and in the report. They do not affect the
            advantage.
        failure: the reason why scoring failed: the function hung, raised or returned an invalid
            value. In that case, `score` is 0.
    """

    score: float
    extra: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Verifier:
    """A verifier compares the text of a response with the ground truth of its row.

    Attributes:
        function: called as (response, ground_truth, *, options); returns a score, a dict with a
            "score", or a `ScoreResult`. It may be async. Arguments named in `FACTS` receive facts
            about the row and the call.
        data_sources: values of the data_source column for which the verifier is used.
        runs_in_driver: True if a call takes microseconds and cannot hang, so it needs neither a
            separate process nor a time limit.
        requires: optional package that the verifier imports; None if it imports none.
        truth: parses a ground truth and raises ValueError if it is invalid. All rows are checked
            before a run starts. None disables the check.
    """

    function: Callable[..., Any]
    data_sources: tuple[str, ...]
    runs_in_driver: bool = False
    requires: str | None = None
    truth: Callable[[Any], object] | None = None

    @property
    def options(self) -> set[str]:
        """Names of the function's keyword-only arguments; they can be set in `reward.kwargs`."""
        return self._keywords() - FACTS

    @property
    def facts(self) -> set[str]:
        """Names of the facts about the row (`FACTS`) that the function accepts."""
        return self._keywords() & FACTS

    @property
    def needed(self) -> set[str]:
        """Names of the options without a default."""
        parameters = inspect.signature(self.function).parameters
        return {
            name for name in self.options if parameters[name].default is inspect.Parameter.empty
        }

    def check_truth(self, ground_truth: Any) -> None:
        """Raise ValueError if the ground truth is invalid."""
        if self.truth is not None:
            self.truth(ground_truth)

    @property
    def is_async(self) -> bool:
        """True if the function is async; a process may then have many calls in flight."""
        return inspect.iscoroutinefunction(self.function)

    def given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options and facts that the function accepts as arguments."""
        return {name: options[name] for name in self._accepted if name in options}

    # once, because it is needed for every row, and `inspect.signature` takes 50 us
    @cached_property
    def _accepted(self) -> tuple[str, ...]:
        return tuple(sorted(self.options | self.facts))

    def _keywords(self) -> set[str]:
        parameters = inspect.signature(self.function).parameters.values()
        return {
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        }


def result_of(found: Any, weight: float = 1.0) -> ScoreResult:
    """Convert the return value of a verifier (a score, a mapping with a "score", or a result) to a
    result.

    Raises:
        ValueError: the score, or its product with `weight`, is not finite in float32.
    """
    score, extra = checked_score(
        {**found.extra, "score": found.score} if isinstance(found, ScoreResult) else found, weight
    )
    return ScoreResult(score, extra)


def text_truth(ground_truth: Any) -> str:
    """Convert a ground truth, a string or a number, to text: 72 and 72.0 become "72".

    Raises:
        ValueError: the ground truth is neither a string nor a number.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, (int, float)) and not isinstance(ground_truth, bool):
        whole = isinstance(ground_truth, float) and ground_truth.is_integer()
        return str(int(ground_truth)) if whole else str(ground_truth)
    raise ValueError(f"the ground truth {ground_truth!r} is neither a string nor a number")


def check_installed(entry: Verifier, what: str) -> None:
    """Raise a ConfigError if a package that the verifier imports is not installed. `what` names the
    verifier in the message."""
    if entry.requires is not None and importlib.util.find_spec(entry.requires) is None:
        package = entry.requires.replace("_", "-")
        raise ConfigError(
            f"{what} needs the Python package {package}, which is not installed; install it (pip "
            f"install {package}), or add your own verifier to reward.verifiers"
        )


def verifier(
    name: str,
    *,
    data_sources: Sequence[str],
    runs_in_driver: bool = False,
    requires: str | None = None,
    truth: Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the verifier for these data sources. `Verifier` documents the
    arguments."""
    return VERIFIERS.entry(
        name,
        lambda function: Verifier(function, tuple(data_sources), runs_in_driver, requires, truth),
    )


def by_data_source(own: Sequence[str] = ()) -> dict[str, Verifier]:
    """Return the verifiers keyed by data source. Verifiers in `own` (`path/to/file.py:name`) take
    precedence over built-in ones.

    Raises:
        ConfigError: a file in `own` cannot be imported, or does not register the verifier.
    """
    found: dict[str, Verifier] = {}
    for name in (*VERIFIERS.names(), *own):
        entry = VERIFIERS.get(name)
        found |= dict.fromkeys(entry.data_sources, entry)
    return found
