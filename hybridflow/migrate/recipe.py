"""Conversion of a migrated run to a recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from hybridflow.migrate.verl import Migration

_COLUMNS = 100
_GROUPS = ("data: files", "model: folder", "rollout: gpu", "cluster: gpu", "sft: none")


def recipe(migration: Migration, source: str) -> str:
    """Return the recipe as YAML. Comments name the source, the differences from it, and the
    settings without an equivalent."""
    import yaml

    lines = [f"# Translated from {source} by `hybridflow migrate verl`."]
    for text in migration.remarks:
        lines += _comment(text)
    if migration.missing:
        lines += ["#", "# Without an equivalent:"]
        for name, reason in migration.missing.items():
            lines += _comment(f"{name}: {reason}", "  ")
    groups = list(_GROUPS)
    if migration.has_critic:
        groups.append("critic: gpu")
    if "reward.path" not in migration.settings:
        groups.append("reward: builtin")
    groups.append("_self_")
    lines.append("defaults:")
    lines += [f"  - {group}" for group in groups]
    lines.append("")
    tree = _tree({"model.dtype": "bfloat16", **migration.settings})
    name = tree.pop("name")
    for section, value in [("name", name), *sorted(tree.items())]:
        text = yaml.safe_dump({section: value}, sort_keys=False, width=_COLUMNS)
        lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str = "") -> list[str]:
    first = f"# {indent}"
    return textwrap.wrap(text, _COLUMNS, initial_indent=first, subsequent_indent=f"{first}  ")


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert {a.b: value} to {a: {b: value}}."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, last = key.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = value
    return tree
