"""Error messages for user flows. Distinguishes mistakes in the code from errors that may depend on
the data.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.config.registry import describe_error, line_of
from hybridflow.config.role_table import CRITICS, ROLES
from hybridflow.errors import HybridFlowError, SchemaError
from hybridflow.trainer.flow_api import Call, FlowApi, Pending, Steps, Updating
from hybridflow.trainer.flow_roles import CALLS, Critic, TrainedPolicy

_NAMES: Mapping[type, str] = {
    FlowApi: "run",
    Steps: "run.steps()",
    TrainedPolicy: "run.policy",
    **{calls: f"run.{name}" for name, calls in CALLS.items()},
    Call: "a call that is not awaited",
    Updating: "a call that is not awaited",
    Pending: "a call that is not awaited",
    DataProto: "a batch",
    types.CoroutineType: "a coroutine that is not awaited",
    types.MethodType: "a method that is not called",
}
_BY_TEXT = {
    **{kind.__name__: name for kind, name in _NAMES.items()},
    "coroutine": _NAMES[types.CoroutineType],
    "method": _NAMES[types.MethodType],
}
_IMMUTABLE = "a batch is immutable; write batch = batch.with_columns(scores=...)"


def _of_critics() -> dict[str, str]:
    """Return {column that a critic writes: the call that writes it}."""
    found = {}
    for of, name in CRITICS.items():
        entry = ROLES[name]
        given = "batch" if of == "scores" else f"batch, of={of!r}"
        in_a_run = f", in a run with {entry.comes_with}" if of == "scores" else ""
        found[f"{entry.prefix}values"] = f"run.{name}.values(batch){in_a_run}"
        found[f"{entry.prefix}returns"] = f"run.advantages({given}){in_a_run}"
    return found


# columns that a flow may read too early, and the calls that write them
_WRITERS = {
    "old_log_probs": "run.policy.log_probs(batch), unless the first update computes it",
    "entropys": "run.policy.log_probs(batch), unless the first update computes it",
    "ref_log_probs": "run.reference.log_probs(batch), in a run with a KL term",
    "rm_scores": "run.reward_model.scores(batch), in a run with reward_model.path",
    "teacher_log_probs": "run.teacher.log_probs(batch), in a run with teacher.path",
    "advantages": "run.advantages(batch)",
    "rewards": "run.advantages(batch)",
    "greedy_scores": "run.samples(greedy=True)",
    "reward_extra": "run.samples(), with a reward that returns more than a score",
    "costs": "the flow: batch.with_columns(costs=...)",
    "prompt": "run.samples(), with data.keep_prompts=true",
    **_of_critics(),
}
_REMEDIES = (
    (ValueError, "read-only", "a batch cannot be changed; write batch.with_columns(scores=...)"),
    (SystemExit, "", "to end the run, use `return`"),
    (RuntimeError, "event loop", "a flow already runs in one; use `await` instead"),
)
_COLUMN = re.compile(r"no column '(\w+)'|reads (\w+)")
_AWAITED = re.compile(r"object (\w+) can't be used in 'await' expression")
_SIGNATURE = re.compile(r"\(\) (?:missing \d+|takes |got an unexpected|got multiple|got some)")


def message_of(name: str, error: BaseException, step: int = 0) -> str:
    """Return the message for an error in a user's flow. It names the flow, the step and the
    line.
    """
    path = Path(name.rpartition(":")[0])
    line = getattr(error, "line", None) or line_of(error, path)
    said = mistake(error)
    if said is None:
        where = ""
        said = describe_error(error, path)
    else:
        where = "" if line is None else f" (line {line})"
        if not isinstance(error, HybridFlowError):
            said = f"{type(error).__name__}: {said}"
    if step and not said.startswith(f"step {step}: "):
        said = f"step {step}: {said}"
    first, newline, rest = said.partition("\n")  # the rest is, for example, the tail of a log
    return f"algorithm.flow={name}: {first}{where}{newline}{rest}"


def mistake(error: BaseException) -> str | None:
    """Describe a mistake in the flow's code; None if the error may have been caused by the data."""
    text = str(error)
    if isinstance(error, HybridFlowError):
        return _of_column(text) if isinstance(error, SchemaError) else text
    if isinstance(error, AttributeError):
        return _of_attribute(error)
    if isinstance(error, ImportError | NameError):
        return None if isinstance(error, UnboundLocalError) else text
    if isinstance(error, TypeError):
        return _of_type(text)
    for kind, part, remedy in _REMEDIES:
        if isinstance(error, kind) and part in text:
            return f"{text}; {remedy}"
    return None


def _of_column(text: str) -> str:
    """Extend the message about a missing column with the call that writes the column."""
    found = _COLUMN.search(text)
    writer = None if found is None else _WRITERS.get(found[1] or found[2])
    return text if writer is None else f"{text}. It is written by {writer}"


def _of_attribute(error: AttributeError) -> str | None:
    """Return the message for an attribute that one of HybridFlow's objects lacks; None for other
    objects.
    """
    kind = type(error.obj)
    name = error.name
    if str(error).startswith("DataProto is immutable"):
        return _IMMUTABLE
    if name is None or kind not in _NAMES:
        return None
    what = f"run.{error.obj.name}" if isinstance(error.obj, Critic) else _NAMES[kind]
    if isinstance(error.obj, Pending):
        return f"{what} has no {name!r}; write `await run.{error.obj.name}`"
    if isinstance(error.obj, types.CoroutineType | types.MethodType):
        return f"{error.obj.__name__!r} is {what}, and has no {name!r}"
    if isinstance(error.obj, DataProto) and (near := _near(name, error.obj.columns)):
        return f"{what} has no {name!r}; to read the column, write batch[{near!r}]"
    near = _near(name, [one for one in dir(error.obj) if not one.startswith("_")])
    return f"{what} has no {name!r}" + (f"; did you mean {near!r}?" if near else "")


def _of_type(text: str) -> str | None:
    """Return the message for a TypeError: an operation that HybridFlow's objects do not support, or
    a call with wrong arguments. None if the error may have been caused by the data.
    """
    if awaited := _AWAITED.search(text):
        what = _BY_TEXT.get(awaited[1], f"a value of type {awaited[1]}")
        return (
            f"{what} is awaited. Only samples, all, sync and role calls can be: remove `await`"
            if "not called" not in what
            else f"{what} is awaited; add `()` after it"
        )
    if "'DataProto' object does not support item" in text:
        return _IMMUTABLE
    if "'async for'" in text:
        return f"{text}; write `async for step in run.steps():`"
    if "a coroutine was expected" in text:
        return f"{text}; calls on the run start immediately, so await the call directly"
    named = [name for name in _BY_TEXT if re.search(rf"'{name}'|\b{name}\.\w+\(\)", text)]
    if not named and not _SIGNATURE.search(text):
        return None
    for name in named:
        text = text.replace(f"{name}.", f"{_BY_TEXT[name]}.")
        text = text.replace(f"'{name}' object", _BY_TEXT[name])
        text = text.replace(f"'{name}'", _BY_TEXT[name])
    return text


def _near(name: str, names: Any) -> str | None:
    found = difflib.get_close_matches(name, list(names), n=1)
    return found[0] if found else None
