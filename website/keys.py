"""The reference of configuration keys, from the recipe schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.config.json_schema import recipe_schema

_HEAD = """\
# Configuration keys

Every key of a recipe with its type, its default and its meaning. A key is set in a YAML file, as a word on the command
line (`actor.optim.lr=1e-4`) or as an argument of [`hf.Run`](../python.md). An unknown key or an impossible value is
rejected before anything starts. Any value may be an interpolation (`${data.train_batch_size}`).

`hybridflow train --config-name NAME --print-config` prints the values that a run would have, `--explain` how the batch
sizes multiply, and `hybridflow config schema` this table as a JSON schema, which editors use to complete keys. Units
are part of a name (`_s` seconds, `_tokens`, `_steps`). "Prompts" counts rows of the dataset, "samples" counts generated
responses: prompts x `rollout.n`.

This page is generated from `hybridflow/config/schema*.py` by `python -m website write`.
"""
_INTERPOLATED = r"\$\{|^\?\?\?$"
_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
}


def document() -> str:
    """Return the page: one section per section of the recipe, a table per group of keys."""
    schema = recipe_schema()
    groups = schema["$defs"]
    top = []
    sections = []
    shown: dict[str, str] = {}
    for name, value in schema["properties"].items():
        if "$ref" in value:
            sections += _section(name, value["$ref"], groups, shown, level=2)
        else:
            top.append(_row(name, value, groups))
    general = ["## The run", "", *_table(top)]
    return "\n".join([_HEAD, *general, *sections])


def _section(
    path: str, reference: str, groups: Mapping[str, Any], shown: dict[str, str], level: int
) -> list[str]:
    """Return a section of keys. A group that was shown under another path is linked instead."""
    kind = reference.rsplit("/", 1)[1]
    group = groups[kind]
    lines = ["", f"{'#' * level} {path}", "", _text(group["description"])]
    if kind in shown:
        first = shown[kind]
        return [*lines, "", f"The keys are those of [{first}](#{_anchor(first)})."]
    shown[kind] = path
    rows = []
    inner = []
    for name, value in group["properties"].items():
        key = f"{path}.{name}"
        if "$ref" in value:
            inner += _section(key, value["$ref"], groups, shown, min(level + 1, 4))
        else:
            rows.append(_row(key, value, groups))
    for name, value in group["properties"].items():
        further = value.get("additionalProperties")
        if isinstance(further, dict) and "$ref" in further:
            inner += _section(f"{path}.{name}.NAME", further["$ref"], groups, shown, 4)
    table = ["", *_table(rows)] if rows else []
    return [*lines, *table, *inner]


def _table(rows: list[str]) -> list[str]:
    return ["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows]


def _row(key: str, value: Mapping[str, Any], groups: Mapping[str, Any]) -> str:
    default = "–"
    if "default" in value:
        default = f"`{json.dumps(value['default'], ensure_ascii=False)}`"
    kind = _kind(value).replace("|", "\\|")
    meaning = _text(value.get("description", ""))
    cells = (f"`{key}`", kind, default.replace("|", "\\|"), meaning)
    return f"| {' | '.join(cells)} |"


def _kind(value: Mapping[str, Any]) -> str:
    """Describe a value's type in words."""
    if "anyOf" in value:
        kinds = []
        for choice in value["anyOf"]:
            if choice.get("pattern") != _INTERPOLATED:
                kinds.append(_kind(choice))
        return " or ".join(kinds)
    if "enum" in value:
        return ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in value["enum"])
    if value.get("pattern") == r"\.py:":
        return "`path/to/file.py:name`"
    if value.get("type") == "array":
        items = value.get("items")
        return f"list of {_kind(items)}" if items else "list"
    name = {"object": "mapping", "null": "null"}.get(value["type"], value["type"])
    bounds = [f"{word} {value[key]}" for key, word in _BOUNDS.items() if key in value]
    return " ".join([name, " and ".join(bounds)]).strip()


def _text(text: str) -> str:
    """Escape a comment for a table cell and link the pages that it names."""
    parts = []
    for piece in re.split(r"(`[^`]*`)", text):
        if piece.startswith("`"):
            parts.append(piece.replace("|", "\\|"))
        else:
            parts.append("".join(_linked(piece)))
    return "".join(parts)


def _linked(text: str) -> Iterator[str]:
    for piece in re.split(r"((?:docs/[\w/-]+|CONTRIBUTING)\.md)", text):
        if piece.startswith("docs/"):
            page = piece.removeprefix("docs/")
            yield f"[{page.removesuffix('.md')}](../{page})"
        elif piece == "CONTRIBUTING.md":
            yield f"[{piece}](../../{piece})"
        else:
            yield re.sub(r"([|*<\[\]])", r"\\\1", piece)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\s-]", "", title).strip().lower()
