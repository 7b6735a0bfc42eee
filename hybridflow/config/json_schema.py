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
    notes = descriptions(type(defaults))
    properties: dict[str, Any] = {}
    for name, annotation in hints_of(cls).items():
        if dataclasses.is_dataclass(annotation):
            inner = cast(type, annotation).__name__
            groups.setdefault(inner, _group(cast(type, annotation)(), groups))
            properties[name] = {"$ref": f"#/$defs/{inner}"}
            continue
        properties[name] = _value(kind_of(annotation)) | {
            "default": to_plain(getattr(defaults, name))
        }
        if (of_names := named_group(annotation)) is not None:
            groups.setdefault(of_names.__name__, _group(of_names(), groups))
            properties[name]["additionalProperties"] = {"$ref": f"#/$defs/{of_names.__name__}"}
        if name in notes:
            properties[name]["description"] = notes[name]
    about = " ".join((cls.__doc__ or "").split())
    return {
        "description": about,
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _value(kind: Kind) -> dict[str, Any]:
    if kind.is_list:
        return _any_of(
            {"type": "array", "items": _value(dataclasses.replace(kind, is_list=False))},
            kind.optional,
        )
    if kind.is_mapping:
        return {"type": "object"}
    if not kind.choices:
        bounds = {bound.keyword: bound.limit for bound in kind.bounds}
        return _any_of({"type": _TYPES[kind.type], **bounds}, kind.optional)
    named: dict[str, Any] = {"enum": list(kind.choices)}
    own = ({"type": "string", "pattern": r"\.py:"},) if kind.entry else ()
    return _any_of(named, kind.optional, *own)


def _any_of(value: dict[str, Any], optional: bool, *more: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [value, *more, *([{"type": "null"}] if optional else []), _FILLED_LATER]}
