"""Strict conversion of a plain mapping to frozen dataclasses: every key must exist, and every value
must have the field's type.

OmegaConf's structured configs are not used, because they return read-only nodes instead of plain
dataclasses, and their errors do not suggest the nearest key (ADR 0004).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from hybridflow.config.keys import Kind, description, hints_of, kind_of, unknown_key
from hybridflow.config.schema import ModelConfig, PolicyConfig, RunConfig
from hybridflow.errors import ConfigError, did_you_mean


def build(values: Mapping[str, Any]) -> RunConfig:
    """Build the run configuration from a plain nested mapping. Missing keys fall back to the
    schema's defaults.

    Raises:
        ConfigError: unknown key, wrong type or a value outside a field's choices. The message names
            the full dotted key.
    """
    config = cast(RunConfig, build_options(RunConfig(), values, ""))
    # an additional policy inherits the settings of the first one
    first = PolicyConfig(config.model, config.actor, config.rollout)
    roles = {}
    for name, given in config.roles.items():
        base = first
        model = given.get("model") if isinstance(given, Mapping) else None
        if isinstance(model, Mapping) and model.get("path") is not None:
            # do not inherit tokenizer, sizes and family: they describe the first policy's model
            base = dataclasses.replace(first, model=ModelConfig(dtype=config.model.dtype))
        roles[name] = build_options(base, given, f"roles.{name}")
    return dataclasses.replace(config, roles=roles)


def to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts and tuples to lists recursively, for YAML and JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {}
        for field in dataclasses.fields(value):
            plain[field.name] = to_plain(getattr(value, field.name))
        return plain
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(to_plain, value))
    return value


def build_options(defaults: Any, values: Any, prefix: str) -> Any:
    """Build a dataclass from `values`, the mapping at key `prefix`. Fields without a value are
    copied from `defaults`, an instance of the class. Raises ConfigError, as `build` does.
    """
    hints = hints_of(type(defaults))
    if not isinstance(values, Mapping):
        place = prefix or "configuration"
        keys = ", ".join(hints)
        raise ConfigError(f"{place}: got {values!r}, expected a group of keys ({keys})")
    converted = {}
    for key, value in values.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if key not in hints:
            raise unknown_key(RunConfig, dotted, str(key), list(hints), prefix)
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            converted[key] = build_options(getattr(defaults, key), value, dotted)
        else:
            converted[key] = _convert(value, kind_of(hint), dotted)
    return dataclasses.replace(defaults, **converted)


def _convert(value: Any, kind: Kind, key: str) -> Any:
    if value is None and kind.optional:
        return None
    if kind.is_list and isinstance(value, (list, tuple)):
        item = dataclasses.replace(kind, is_list=False)
        items = []
        for i, entry in enumerate(value):
            items.append(_convert(entry, item, f"{key}[{i}]"))
        return tuple(items)
    if kind.is_mapping and isinstance(value, Mapping):
        return dict(value)
    if not kind.is_list and kind.plain is float and type(value) in (int, float):
        return float(value)
    if kind.is_list or type(value) is not kind.plain:
        raise ConfigError(f"{key}: got {value!r}, expected {kind}{_hint(value, kind, key)}")
    if kind.aliases:
        value = dict(kind.aliases).get(value, value)
    if not kind.accepts(value):
        choices = ", ".join(kind.choices)
        own = ", or path/to/file.py:name" if kind.entry else ""
        hint = did_you_mean(value, kind.choices)
        message = f"{key}: got {value!r}, choose one of: {choices}{own}{hint}"
        meaning = description(RunConfig, key.partition("[")[0])
        if meaning:
            message += f" ({meaning})"
        raise ConfigError(message)
    return value


def _hint(value: Any, kind: Kind, key: str) -> str:
    if kind.is_list:
        return f"; write {key}=[{value}]"
    if kind.plain is str and isinstance(value, (int, float)):
        return f"; to keep it a string, quote it (on the command line: {key}='\"{value}\"')"
    return ""
