"""Checks of a model folder before a device is allocated: how a run would read it, and whether a
recipe fits.

All checks use the same loader, tokenizer, planner and export as a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config import derived
from hybridflow.config.check import recipes_for
from hybridflow.config.schema import ModelConfig, RunConfig
from hybridflow.doctor import tokens, weights
from hybridflow.doctor.findings import Finding, exit_code
from hybridflow.doctor.parity import BOUND, Backend, compare_with_transformers
from hybridflow.errors import HybridFlowError, ModelError
from hybridflow.models import Family, family_of, use_family
from hybridflow.models.family import num_parameters
from hybridflow.models.miniature import miniature
from hybridflow.planning.advice import refused
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.job import job_of
from hybridflow.planning.plan import make_plan
from hybridflow.planning.transfer import transfer_of

PARITY_TIMEOUT_S = 120.0  # a copy takes 7 s on two cores
_GB = 1e9


def examine(folder: Path, config: RunConfig | None = None) -> list[Finding]:
    """Return all findings for a model folder, and for a recipe whose `model.path` is this
    folder."""
    try:
        use_family(config.model.family if config is not None else None)
        hf = derived.run_hf_config(config or RunConfig(), ModelConfig(path=str(folder)))
        family = family_of(hf)
    except HybridFlowError as error:
        return [Finding("config", "error", str(error), _remedy_of_config(folder))]
    found = [Finding("config", "ok", _described(family)), *weights.findings(folder, family)]
    found += tokens.findings(folder, hf, _observed(config))
    if exit_code(found):
        found.append(Finding("parity", "unused", "skipped until the errors above are fixed"))
    else:
        found += [*_copy(folder, hf, config.actor.backend if config is not None else "megatron")]
    return found + ([*_fitting_recipes(hf)] if config is None else [*_recipe(config, hf)])


def _observed(config: RunConfig | None) -> str | None:
    """Return the role of the messages (e.g. tool results) that the recipe inserts after answers, or
    None if it inserts none."""
    if config is None or config.rollout.agent.loop == "single_turn":
        return None
    return config.rollout.agent.observation_role


def _remedy_of_config(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return (
            "pass the folder of a model as downloaded by: hf download ORG/NAME --local-dir FOLDER"
        )
    return (
        "docs/recipes.md lists the supported families; to use your own, set "
        "model.family=path/to/file.py:MODEL_TYPE"
    )


def _described(family: Family) -> str:
    count = num_parameters(family)
    size = f"{count / 1e9:,.1f} billion" if count >= 1e8 else f"{count / 1e6:,.1f} million"
    name = f"{family.hf['model_type']} ({family.architecture})"
    return f"{name}, {family.num_layers} layers, {size} parameters"


def _copy(folder: Path, hf: Mapping[str, Any], backend: Backend) -> Iterator[Finding]:
    """Compare a small random copy of the architecture with transformers."""
    topic = "parity"
    try:
        found = compare_with_transformers(miniature(hf), folder, backend, PARITY_TIMEOUT_S)
    except ModelError as error:
        yield Finding(
            topic,
            "error",
            f"a small copy of the config: {error}",
            "report it with this config.json",
        )
        return
    what = (
        f"log-probs of a small copy ({found.parameters:,} parameters) differ from "
        f"{found.reference}'s"
    )
    wrong = not found.log_probs < BOUND  # True also for NaN
    remedy = "do not train this model; report it with this config.json" if wrong else ""
    yield Finding(
        topic,
        "error" if wrong else "ok",
        f"{what} by {found.log_probs:.1e} (bound {BOUND:.0e})",
        remedy,
    )
    lost = found.exported != 0.0  # True also for NaN
    what = "transformers loads the copy's export" + (
        f", but results differ by {found.exported:.1e}" if lost else ", bitwise identical"
    )
    yield Finding("export", "error" if lost else "ok", what, remedy if lost else "")


def _fitting_recipes(hf: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding that lists the recipes for a model of this size."""
    if names := recipes_for(hf):
        remedy = f"--recipe {names[0]}" + (f" (or {', '.join(names[1:])})" if names[1:] else "")
        yield Finding("recipe", "unused", "none given; recipes of this size exist", remedy)
    else:
        remedy = (
            "for a new size, copy the nearest recipe and remove model.hf_config (docs/recipes.md)"
        )
        yield Finding(
            "recipe", "unused", "none given, and no shipped recipe has these sizes", remedy
        )


def _recipe(config: RunConfig, hf: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on the recipe's layout, memory, step time and weight sync."""
    wrong = refused(config)
    for problem in wrong:
        yield Finding(
            "recipe", "error", problem, "correct the key, or choose a recipe of this size"
        )
    if wrong:
        return
    parallel = config.actor.parallel
    sizes = (
        ("TP", parallel.tensor),
        ("PP", parallel.pipeline),
        ("CP", parallel.context),
        ("EP", parallel.expert),
    )
    shape = " ".join(f"{short}{size}" for short, size in sizes if size > 1)
    yield Finding(
        "layout", "ok", f"{derived.world_size(config)} ranks, {shape or 'data-parallel only'}"
    )
    yield from _planned(config, hf)
    yield from _sync(config, hf)


def _planned(config: RunConfig, hf: Mapping[str, Any]) -> Iterator[Finding]:
    cluster = config.cluster
    try:
        each = cluster.devices_per_node or cluster.procs_per_node
        plan = make_plan(
            job_of(config, read_cluster(None, cluster.nodes, each, cluster.device), hf=hf)
        )
    except HybridFlowError as error:
        yield Finding("plan", "error", str(error), "for details, run hybridflow plan")
        return
    figures = plan.figures()
    where = f"{figures['peak_bytes'] / _GB:.0f} of {figures['device_bytes'] / _GB:.0f} GB"
    memory = (
        f"peak {where} per device ({figures['peak_phase']}), host "
        f"{figures['host_bytes_per_node'] / _GB:,.0f} GB per node"
    )
    if not plan.fits:
        remedy = (
            "run hybridflow plan --config-name RECIPE model.path=FOLDER for the nearest change "
            "that fits"
        )
        yield Finding("memory", "error", f"{memory}: {'; '.join(figures['problems'])}", remedy)
    else:
        yield Finding("memory", "ok", memory)
    seconds = f"{figures['step_seconds']:,.0f} s per step, mostly {figures['bottleneck']}"
    yield Finding(
        "time", "ok", f"{seconds}, on {figures['devices']} {figures['device']} (docs/planning.md)"
    )


def _sync(config: RunConfig, hf: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        made = transfer_of(config, hf)
    except HybridFlowError as error:
        yield Finding("sync", "error", str(error), "for details, run hybridflow plan --transfer")
        return
    figures = made.figures()
    unused = figures["unused"]
    what = (
        f"{figures['slices']:,} slices to {figures['engines']} engines, writing each engine "
        "element once"
    )
    yield Finding(
        "sync",
        "ok",
        f"{what}; {len(unused)} tensors unused{': ' * bool(unused)}{', '.join(unused[:3])}",
    )
