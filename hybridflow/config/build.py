"""Plain mapping -> frozen dataclasses, strictly: every key must exist, every value must have the field's type.

OmegaConf's structured configs would give read-only nodes instead of our dataclasses, and messages without the nearest
key (ADR 0004).
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, cast

from hybridflow.config.choices import CHOICES
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError


def build(values: Mapping[str, Any]) -> RunConfig:
    """Build the run configuration from a plain nested mapping; what is not given keeps the schema's default.

    Raises:
        ConfigError: unknown key, wrong type or a value outside a field's choices. The message names the full dotted
        key.
    """
    return cast(RunConfig, _build_group(RunConfig(), values, ""))


def build_options(defaults: Any, values: Mapping[str, Any], key: str) -> Any:
    """A dataclass with what is given in `values`, the mapping at `key`, in place of its `defaults`. ConfigError: as
    `build`."""
    return _build_group(defaults, values, key)


def to_plain(value: Any) -> Any:
    """Dataclasses -> dicts and tuples -> lists, all the way down: what YAML and JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def require_key(dotted: str) -> None:
    """Raise unless `dotted` names a group or field of the schema, or an entry inside a free mapping (such as
    `model.hf_config.X`)."""
    annotation: Any = RunConfig
    seen: list[str] = []
    for part in dotted.split("."):
        if not dataclasses.is_dataclass(annotation):
            if _is_mapping(annotation):
                return
            raise ConfigError(
                f"{dotted}: {'.'.join(seen)} is a single value of type {describe(annotation)}, it has no keys of its "
                f"own"
            )
        hints = typing.get_type_hints(annotation)
        if part not in hints:
            raise _unknown_key(part, list(hints), ".".join(seen), dotted)
        annotation = hints[part]
        seen.append(part)


def all_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields, groups excluded."""
    for name, annotation in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            yield from all_keys(cast(type, annotation), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def describe(annotation: Any) -> str:
    """A type as a user would say it: `int or null`, `list of strings`."""
    if _is_union(annotation):
        return " or ".join(describe(member) for member in typing.get_args(annotation))
    if _is_mapping(annotation):
        return "mapping"
    if typing.get_origin(annotation) is tuple:
        return f"list of {describe(typing.get_args(annotation)[0])}s"
    names = {type(None): "null", str: "string", bool: "true/false", int: "whole number", float: "number"}
    return names.get(annotation, "group of keys")


def _build_group(defaults: Any, values: Any, prefix: str) -> Any:
    """Replace what is given in `defaults`: a group may have other defaults than its class (`sft.optim`,
    `rollout.val_sampling`)."""
    hints = typing.get_type_hints(type(defaults))
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix or 'configuration'}: got {values!r}, expected a group of keys ({', '.join(hints)})")
    for key in values:
        if key not in hints:
            raise _unknown_key(str(key), list(hints), prefix, f"{prefix}.{key}" if prefix else str(key))
    converted = {}
    for key, value in values.items():
        dotted = f"{prefix}.{key}" if prefix else key
        if dataclasses.is_dataclass(hints[key]):
            converted[key] = _build_group(getattr(defaults, key), value, dotted)
        else:
            converted[key] = _convert(value, hints[key], dotted)
    return dataclasses.replace(defaults, **converted)


def _convert(value: Any, annotation: Any, key: str) -> Any:
    if not _is_union(annotation):
        return _convert_or_raise(value, annotation, key, annotation)
    members = typing.get_args(annotation)
    if value is None and type(None) in members:
        return None
    inner = next(member for member in members if member is not type(None))
    return _convert_or_raise(value, inner, key, annotation)


def _convert_or_raise(value: Any, annotation: Any, key: str, shown: Any) -> Any:
    if typing.get_origin(annotation) is tuple and isinstance(value, (list, tuple)):
        item = typing.get_args(annotation)[0]
        return tuple(_convert_or_raise(entry, item, f"{key}[{i}]", item) for i, entry in enumerate(value))
    if _is_mapping(annotation) and isinstance(value, Mapping):
        return dict(value)
    if annotation is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if annotation in (str, int, bool) and type(value) is annotation:
        return _check_choice(value, key)
    raise ConfigError(f"{key}: got {value!r}, expected {describe(shown)}{_type_hint(value, annotation, key)}")


def _type_hint(value: Any, annotation: Any, key: str) -> str:
    if annotation is str and isinstance(value, (int, float)):
        return f"; quote it to keep it a string, on the command line {key}='\"{value}\"'"
    if typing.get_origin(annotation) is tuple:
        return f"; write {key}=[{value}]"
    return ""


def _check_choice(value: Any, key: str) -> Any:
    choices = CHOICES.get(key.split("[", maxsplit=1)[0])
    if choices is None or value in choices:
        return value
    raise ConfigError(f"{key}: got {value!r}, choose one of: {', '.join(choices)}")


def _unknown_key(part: str, valid: list[str], prefix: str, dotted: str) -> ConfigError:
    near = difflib.get_close_matches(part, valid, n=1, cutoff=0.5)
    suggestion = f"{prefix}.{near[0]}" if prefix and near else near[0] if near else _elsewhere(part)
    where = f"the keys of {prefix} are" if prefix else "the top-level keys are"
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    return ConfigError(f"unknown key {dotted}{hint} ({where}: {', '.join(valid)})")


def _elsewhere(part: str) -> str:
    """A key whose last name is close to `part` though it lives in another group (`lr` -> `actor.optim.lr`)."""
    by_name: dict[str, str] = {}
    for key in all_keys():
        by_name.setdefault(key.rsplit(".", 1)[-1], key)
    near = difflib.get_close_matches(part, by_name, n=1, cutoff=0.7)
    return by_name[near[0]] if near else ""


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union


def _is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict
