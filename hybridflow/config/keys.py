"""Metadata of configuration keys, and the schema as a list of keys.

A key's annotation contains its type, `| None`, its choices (`Literal`), its range (`Annotated[int,
AtLeast(1)]`) and the registry of its entries (`Annotated[str, Entry(...)]`). A key is described by
the comment that follows it on the same line or precedes it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

from hybridflow.config.registry import Registry, is_user_entry, package_folder
from hybridflow.config.verl_keys import counterpart
from hybridflow.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower or upper bound on a number; `keyword` is its name in JSON Schema."""

    limit: float
    words: ClassVar[str]
    keyword: ClassVar[str]
    compare: ClassVar[Callable[[float, float], bool]]

    def holds(self, number: float) -> bool:
        """Return True if the number satisfies the bound."""
        return type(self).compare(number, self.limit)

    def __str__(self) -> str:
        return f"{self.words} {self.limit:g}"


class AtLeast(Bound):
    """A bound that requires values of at least `limit`."""

    words = "at least"
    keyword = "minimum"
    compare = operator.ge


class Above(Bound):
    """Values above `limit`."""

    words = "more than"
    keyword = "exclusiveMinimum"
    compare = operator.gt


class AtMost(Bound):
    """A bound that requires values of at most `limit`."""

    words = "at most"
    keyword = "maximum"
    compare = operator.le


class Below(Bound):
    """Values below `limit`."""

    words = "less than"
    keyword = "exclusiveMaximum"
    compare = operator.lt


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
NonNegative = Annotated[float, AtLeast(0)]
Share = Annotated[float, AtLeast(0), AtMost(1)]
Decay = Annotated[float, AtLeast(0), Below(1)]


@dataclasses.dataclass(frozen=True)
class Aliases:
    """Names that other trainers use for a key's values, as (name, value) pairs."""

    pairs: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Marks a key whose value names an entry in the package's registry or in a user file
    (`path/to/file.py:name`), or is one of the extra values in `also`."""

    kind: str
    package: str
    also: tuple[str, ...] = ()
    packages: bool = False

    def names(self) -> tuple[str, ...]:
        """Return all values except custom entries. Built-in entries are listed from the package's
        folder without importing them."""
        return (
            *self.also,
            *Registry[Any](self.kind, self.package, "", packages=self.packages).names(),
        )

    def summaries(self) -> dict[str, str]:
        """Return {built-in entry: the first paragraph of its module's docstring}."""
        texts = {}
        for file in package_folder(self.package).glob("*.py"):
            texts[file.stem] = file.read_text(encoding="utf-8")
        docs = {}
        for name in self.names():
            if name in texts:
                docs[name] = ast.get_docstring(ast.parse(texts[name])) or ""
        return {name: doc.partition("\n\n")[0].replace("\n", " ") for name, doc in docs.items()}


AGENT_LOOP = Entry("agent loop", "hybridflow.agents.loops")
CALL_FORMAT = Entry("format of calls", "hybridflow.agents.formats")
ENGINE = Entry("engine kind", "hybridflow.engines", packages=True)
ENVIRONMENT = Entry("environment", "hybridflow.agents.environments")
ESTIMATOR = Entry("advantage estimator", "hybridflow.algorithms.estimators")
FLOW = Entry("flow", "hybridflow.flows")
POLICY_LOSS = Entry("policy loss", "hybridflow.algorithms.policy_losses")
PREPARE_TASK = Entry("preparation task", "hybridflow.data.prepare.tasks")
TOOL = Entry("tool", "hybridflow.agents.tools")
TRACKER = Entry("tracker", "hybridflow.observe.trackers")
TRANSPORT = Entry("weight transport", "hybridflow.sync.transports", also=("auto",))
VERIFIER = Entry("verifier", "hybridflow.rewards.verifiers")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A parsed annotation. `type` is the bare type, or the item type of a list."""

    type: Any
    is_list: bool = False
    optional: bool = False
    bounds: tuple[Bound, ...] = ()
    entry: Entry | None = None
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values: the key's choices, or the built-in entries of its registry."""
        if typing.get_origin(self.type) is typing.Literal:
            return typing.get_args(self.type)
        return self.entry.names() if self.entry else ()

    @property
    def is_mapping(self) -> bool:
        """True if the value is a mapping with arbitrary keys (`model.hf_config`)."""
        return typing.get_origin(self.type) is dict

    @property
    def plain(self) -> Any:
        """The bare type, or str for a key with choices."""
        return str if typing.get_origin(self.type) is typing.Literal else self.type

    def accepts(self, value: Any) -> bool:
        """Return True if `value` is one of the choices or if the key has no choices."""
        return (
            not self.choices
            or value in self.choices
            or (self.entry is not None and is_user_entry(value))
        )

    def __str__(self) -> str:
        """Return the type in user-facing terms, such as `whole number or null` or `list of
        strings`.
        """
        names = {str: "string", bool: "true/false", int: "whole number", float: "number"}
        name = "mapping" if self.is_mapping else names.get(self.plain, "group of keys")
        return (f"list of {name}s" if self.is_list else name) + (
            " or null" if self.optional else ""
        )


@functools.cache
def kind_of(annotation: Any) -> Kind:
    """Parse an annotation: `Annotated`, `| None` and `tuple[..., ...]` in any order."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = kind_of(args[0])
        marks = annotation.__metadata__
        entry = next((mark for mark in marks if isinstance(mark, Entry)), inner.entry)
        bounds = tuple(mark for mark in marks if isinstance(mark, Bound))
        pairs: list[tuple[str, str]] = []
        for mark in marks:
            if isinstance(mark, Aliases):
                pairs.extend(mark.pairs)
        aliases = tuple(pairs)
        return dataclasses.replace(
            inner, bounds=inner.bounds + bounds, entry=entry, aliases=inner.aliases + aliases
        )
    if origin in (types.UnionType, typing.Union):
        inner = kind_of(next(member for member in args if member is not type(None)))
        return dataclasses.replace(inner, optional=True)
    if origin is tuple:
        return dataclasses.replace(kind_of(args[0]), is_list=True)
    return Kind(annotation)


def named_group(annotation: Any) -> type | None:
    """Return the dataclass of the values in a mapping such as `roles`; None for other
    annotations."""
    args = typing.get_args(annotation)
    of_names = args[1] if typing.get_origin(annotation) is dict and len(args) == 2 else None
    return of_names if isinstance(of_names, type) and dataclasses.is_dataclass(of_names) else None


def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the annotations of a group's fields, keyed by field, with `Annotated` preserved."""
    return _hints(cls)


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(cls, include_extras=True))


def all_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Kind]]:
    """Yield (dotted name, kind) for every key under a group; groups themselves are not included."""
    for name, annotation in hints_of(cls).items():
        if dataclasses.is_dataclass(annotation):
            yield from all_keys(cast(type, annotation), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind_of(annotation)


def require_key(root: type, dotted: str) -> None:
    """Raise a ConfigError unless `dotted` names a group or key under `root`, or an entry in a
    mapping (such as `model.hf_config.X`)."""
    annotation: Any = root
    seen: list[str] = []
    for part in dotted.split("."):
        if not dataclasses.is_dataclass(annotation):
            kind = kind_of(annotation)
            if kind.is_mapping:
                return
            if (known := _of_verl(root, dotted)) is not None:
                raise known
            raise ConfigError(
                f"{dotted}: {'.'.join(seen)} is a single value of type {kind} and has no keys"
            )
        hints = hints_of(cast(type, annotation))
        if part not in hints:
            raise unknown_key(root, dotted, part, list(hints), ".".join(seen))
        annotation = hints[part]
        seen.append(part)


def exists(root: type, dotted: str) -> bool:
    """Return True if the key exists (see `require_key`)."""
    try:
        require_key(root, dotted)
    except ConfigError:
        return False
    return True


def unknown_key(root: type, dotted: str, part: str, valid: list[str], prefix: str) -> ConfigError:
    """Return the error for `dotted`, whose `part` does not exist in the group `prefix`. The error
    suggests the first of these that exists: the equivalent of a verl key, a key in the same group
    with the same ending (`data.batch_size` -> `data.train_batch_size`), a key with the same name in
    another group, or the nearest name in this or another group.
    """
    if (known := _of_verl(root, dotted)) is not None:
        return known
    longer = [name for name in valid if name.endswith(f"_{part}")]
    near = longer or difflib.get_close_matches(part, valid, n=1, cutoff=0.5)
    suggestion = "" if longer else _elsewhere(root, part, prefix, 1.0)
    suggestion = suggestion or (
        f"{prefix}.{near[0]}".lstrip(".") if near else _elsewhere(root, part, prefix, 0.7)
    )
    where = f"the keys of {prefix} are" if prefix else "the top-level keys are"
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    return ConfigError(f"unknown key {dotted}{hint} ({where}: {', '.join(valid)})")


def _of_verl(root: type, dotted: str) -> ConfigError | None:
    """Return the error for a verl key, or None if it is not one."""
    key, note = counterpart(dotted)
    if key and exists(root, key):
        return ConfigError(
            f"unknown key {dotted}; did you mean {key}?"
            + (f" {note}" if note.startswith("(") else "")
        )
    return ConfigError(f"unknown key {dotted}: {note}") if note else None


def _elsewhere(root: type, part: str, group: str, cutoff: float) -> str:
    """Return a key in another group whose last component is similar to `part` (`actor.lr` ->
    `actor.optim.lr`). If there are several, return the one that shares the most parent groups with
    `group`.
    """
    wanted = group.split(".")
    by_name: dict[str, list[str]] = {}
    for key, _ in all_keys(root):
        by_name.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    near = difflib.get_close_matches(part, by_name, n=1, cutoff=cutoff)
    keys = by_name[near[0]] if near else [""]
    return max(
        keys,
        key=lambda key: [one == other for one, other in zip(key.split("."), wanted, strict=False)],
    )


def value_at(config: Any, dotted: str) -> Any:
    """Return the value of the key with this dotted name."""
    return operator.attrgetter(dotted)(config)


def differing(config: Any, wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, actual value, wanted value) for each key of `wanted` whose value differs. Values
    are formatted as in YAML.
    """
    for key, value in wanted.items():
        if (given := value_at(config, key)) != value:
            yield key, as_text(given), as_text(value)


def as_text(value: Any) -> str:
    """Format a value as in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def _holds(bound: Any, numbers: Sequence[Any]) -> bool:
    return all(map(bound.holds, numbers))


def out_of_range(config: Any) -> Iterator[str]:
    """Yield one line for every number in `config` that is outside its key's range or not finite."""
    for key, kind in all_keys(type(config)):
        value = value_at(config, key)
        if kind.type not in (int, float) or value is None:
            continue
        numbers = value if kind.is_list else [value]
        carried = [bound for bound in _carried(key, kind) if not _holds(bound, numbers)]
        bounds = (*kind.bounds, *carried)
        within = all(_holds(bound, numbers) for bound in bounds)
        if not within or not all(map(math.isfinite, numbers)):
            wanted = " and ".join(map(str, bounds)) or "finite"
            meaning = description(type(config), key)
            yield f"{key}={value} must be {wanted}" + (f" ({meaning})" if meaning else "")


def _carried(key: str, kind: Kind) -> tuple[Bound, ...]:
    """Return the bounds that apply to every number: integers must be exact in JSON and fit in 64
    bits, and deadlines must be below about 30 years."""
    if kind.type is int:
        return (AtMost(1e15), AtLeast(-1e15))
    return (AtMost(1e9),) if key.endswith("_s") else ()


def description(root: type, dotted: str) -> str:
    """Return a key's comment, or an empty string if it has none."""
    *groups, name = dotted.split(".")
    names = iter(groups)
    for group in names:
        root = hints_of(root).get(group, root)
        if (of_names := named_group(root)) is not None:
            root = of_names
            next(names, None)  # the name under which users know it
        if not dataclasses.is_dataclass(root):
            return ""  # an option of an entry
    return descriptions(root).get(name, "")


def descriptions(cls: type) -> dict[str, str]:
    """Read the comments of a group's keys from the source. A comment follows its key on the same
    line or precedes it.
    """
    found: dict[str, str] = {}
    for base in reversed(list(filter(dataclasses.is_dataclass, cls.__mro__))):
        before: list[str] = []
        for line in inspect.getsource(base).splitlines():
            code, _, comment = line.strip().partition("# ")
            name, colon, _ = code.partition(": ")
            if (
                code
                and colon
                and name.isidentifier()
                and (text := " ".join([*before, comment]).strip())
            ):
                found[name] = text
            before = [*before, comment] if comment and not code else []
    return found
