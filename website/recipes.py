"""The reference of recipes: what each trains, on which data and in which layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.locate import Recipe, list_recipes, shipped_config_dir
from hybridflow.config.model_config import flattened

_HEAD = """\
# All recipes

Every recipe that is shipped, with its model, the layout of the trainer and the engines, and its data. `hybridflow
train` lists the same names, and `hybridflow train --config-name NAME` runs one; any key may follow. A recipe is a file
of `configs/`, composed of the groups that its `defaults` name; [Configuration keys](keys.md) has all keys.

This page is generated from `configs/*.yaml` by `python -m website write`.
"""
_TINY = """
## On two cores, without a GPU
These run to their end on a laptop, with data that `hybridflow` prepares itself unless another name is given.
"""
_LARGE = """
## On a GPU cluster
One for each algorithm, model and cluster size. They were planned, not run: [Recipes for
clusters](../recipes.md) has the predicted memory and seconds of a step of each, and the published runs that they
follow.
"""
_TABLE = "\n| Recipe | Model | Trainer | Engines | Data | About |\n|---|---|---|---|---|---|"


def document() -> str:
    """Return the page: a table for laptops, a table for clusters."""
    folder = shipped_config_dir()
    small = []
    large = []
    for recipe in list_recipes([folder]):
        rows = large if recipe.name.endswith("x8") else small
        rows.append(_row(recipe, composed(folder, recipe.name)))
    return "\n".join([_HEAD + _TINY + _TABLE, *small, _LARGE + _TABLE, *large]) + "\n"


def composed(folder: Path, name: str) -> dict[str, Any]:
    """Return the settings of a recipe's files, merged as its `defaults` say, without interpolation
    and schema. `hybridflow.config.load` does the same with both; 80 recipes take it half a minute.
    """
    return _merged(folder, folder / f"{name}.yaml", "")


def _merged(folder: Path, file: Path, package: str) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    own = yaml.load(text, Loader=yaml.CSafeLoader) or {}
    defaults = own.pop("defaults", ["_self_"])
    if re.search(r"^# @package _global_$", text, re.MULTILINE):
        package = ""
    if "_self_" not in defaults:
        defaults.append("_self_")
    found: dict[str, Any] = {}
    for entry in defaults:
        if entry == "_self_":
            part = {package: own} if package else own
        elif isinstance(entry, str):
            part = _merged(folder, file.with_name(f"{entry}.yaml"), package)
        else:
            [(group, choice)] = entry.items()
            group = group.strip("/")
            part = _merged(folder, folder / group / f"{choice}.yaml", group)
        found = _over(found, part)
    return found


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above`, mappings merged."""
    found = dict(below)
    for key, value in above.items():
        inner = found.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        found[key] = _over(inner, value) if both else value
    return found


def _row(recipe: Recipe, run: Mapping[str, Any]) -> str:
    cells = (
        f"`{recipe.name}`",
        _model(run["model"]),
        _trainer(run),
        _engines(run.get("rollout", {}), run.get("cluster", {})),
        _data(run.get("data", {})),
        recipe.summary.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _model(model: Mapping[str, Any]) -> str:
    path = model.get("path")
    if path and not str(path).startswith("${"):
        return f"`{path}`"
    sizes = flattened(model.get("hf_config", {}))
    if not sizes:
        return "a folder"
    layers = sizes["num_hidden_layers"]
    return f"{sizes['model_type']}, {layers} layers x {sizes['hidden_size']}, random weights"


def _trainer(run: Mapping[str, Any]) -> str:
    cluster = run["cluster"]
    actor = run.get("actor", {})
    parallel = actor.get("parallel", {})
    ranks = cluster.get("nodes", 1) * cluster.get("procs_per_node", 1)
    names = (("TP", "tensor"), ("PP", "pipeline"), ("CP", "context"), ("EP", "expert"))
    cut = [f"{short}{parallel[key]}" for short, key in names if parallel.get(key, 1) > 1]
    backend = " FSDP2" if actor.get("backend") == "fsdp" else ""
    where = ", in the driver" if cluster.get("in_process") else ""
    return f"{ranks} rank{'s' * (ranks > 1)}{backend}{' ' * bool(cut)}{' '.join(cut)}{where}"


def _engines(rollout: Mapping[str, Any], cluster: Mapping[str, Any]) -> str:
    kind = rollout.get("engine", "sglang")
    shape = f"TP{rollout.get('tensor', 1)}"
    number = rollout.get("num_engines", 1)
    return f"{kind}, in the driver" if cluster.get("in_process") else f"{number} x {kind} {shape}"


def _data(data: Mapping[str, Any]) -> str:
    task = data.get("prepare", {}).get("task")
    if task:
        return f"`{task}`"
    files = data.get("train_files")
    if not files:
        return "your files"
    return ", ".join(f"`{file}`" for file in files)
