"""The JSON schema of recipes, generated from the typed schema. Editors use it for completion and
validation.

A recipe may set any subset of the keys, and any value may be an interpolation
(`${data.train_batch_size}`) or `???`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from hybridflow.config.build import to_plain
from hybridflow.config.keys import Kind, descriptions, hints_of, kind_of, named_group
from hybridflow.config.schema import RunConfig

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_FILLED_LATER = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe. `$defs` contains the schemas of group files."""
    groups: dict[str, Any] = {}
    top = _group(RunConfig(), groups)
    top["properties"]["defaults"] = {
        "type": "array",
        "description": "the group files that the recipe is composed of",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "HybridFlow recipe",
        **top,
        "$defs": dict(sorted(groups.items())),
    }


def _group(defaults: Any, groups: dict[str, Any]) -> dict[str, Any]:
    cls = type(defaults)
    notes = descriptions(cls)
    properties: dict[str, Any] = {}
    for name, annotation in hints_of(cls).items():
        if dataclasses.is_dataclass(annotation):
            properties[name] = _reference(cast(type, annotation), groups)
            continue
        value = _value(kind_of(annotation))
        value["default"] = to_plain(getattr(defaults, name))
        inner = named_group(annotation)
        if inner is not None:
            value["additionalProperties"] = _reference(inner, groups)
        if name in notes:
            value["description"] = notes[name]
        properties[name] = value
    about = " ".join((cls.__doc__ or "").split())
    return {
        "description": about,
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _reference(group: type, groups: dict[str, Any]) -> dict[str, str]:
    """Add the schema of a group to `groups`, and return a reference to it."""
    groups.setdefault(group.__name__, _group(group(), groups))
    return {"$ref": f"#/$defs/{group.__name__}"}


def _value(kind: Kind) -> dict[str, Any]:
    if kind.is_mapping and not kind.is_list:
        return {"type": "object"}
    choices: list[dict[str, Any]] = []
    if kind.is_list:
        items = _value(dataclasses.replace(kind, is_list=False))
        choices.append({"type": "array", "items": items})
    elif kind.choices:
        choices.append({"enum": list(kind.choices)})
        if kind.entry:
            choices.append({"type": "string", "pattern": r"\.py:"})
    else:
        bounds = {bound.keyword: bound.limit for bound in kind.bounds}
        choices.append({"type": _TYPES[kind.type], **bounds})
    if kind.optional:
        choices.append({"type": "null"})
    choices.append(_FILLED_LATER)
    return {"anyOf": choices}
