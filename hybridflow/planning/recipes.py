"""The shipped recipes for GPU clusters, planned: what docs/recipes.md says."""

from __future__ import annotations

import functools

from hybridflow.config.load import files_of, load_config
from hybridflow.config.locate import list_recipes, shipped_config_dir
from hybridflow.config.schema import RunConfig
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.job import job_of
from hybridflow.planning.plan import Plan, make_plan
from hybridflow.planning.table import markdown

_HEAD = """\
# Recipes

One recipe for each algorithm, model and cluster size: `ALGORITHM-MODEL-NODESxGPUS`. They were
planned, not run: the table below is what `hybridflow plan` says of each, written by `hybridflow
plan --recipes > docs/recipes.md`, and a test keeps it so. [planning.md](planning.md) says what is
modelled and how well that agrees with published runs.

A recipe names a published run whose batch, lengths, rates and bounds it follows
(`configs/published/`, each with its source), its model with the hub id of the checkpoint
(`configs/model/`), and a layout. `hf download` fetches the model and the data sets into the Hugging
Face cache, where a run finds them; `hybridflow train --config-name NAME --explain` names the
commands that are still to be given. Other places: `model.path=FOLDER`, whose config.json must be
that of the recipe's model, and `data=files data.train_files=[...] data.val_files=[...]`. Half of
the longest prompt and answer in the mean is assumed here. `+scale=laptop ~model.hf_config` takes
any of them to its end on a tiny model without a GPU ([laptop.md](laptop.md)).

No recipe computes activations again that fit without, and `hybridflow plan --auto` finds no layout
of the same settings that is more than 5% faster; a test keeps it so.

DeepSeek-V3 and Kimi-K2 have 61 layers, Qwen3-235B-A22B 94: the first and the last pipeline stage of
these recipes have fewer layers than the others (`actor.parallel.first_stage_layers`,
`last_stage_layers`).

"""


def names() -> list[str]:
    """The recipes for GPU clusters, by name."""
    shipped: list[str] = []
    for recipe in list_recipes([shipped_config_dir()]):
        if recipe.name.endswith("x8"):
            shipped.append(recipe.name)
    return shipped


@functools.cache
def recipe_plan(name: str) -> tuple[RunConfig, Plan]:
    """A shipped recipe, and its plan on the cluster that it names."""
    config = load_config(name)
    cluster = config.cluster
    return config, make_plan(
        job_of(
            config, read_cluster(None, cluster.nodes, cluster.devices_per_node or 8, cluster.device)
        )
    )


def _published(name: str) -> str:
    """The file of the group `published` that a recipe follows."""
    folder = shipped_config_dir()
    files = files_of(name, [], [folder])
    return next((file.stem for file, _ in files if file.parent == folder / "published"), "")


def document() -> str:
    """docs/recipes.md."""
    head = (
        "recipe",
        "published run",
        "devices",
        "trainer",
        "engines",
        "memory",
        "step",
        "bottleneck",
        "device hours a step",
    )
    rows = []
    for name in names():
        _, plan = recipe_plan(name)
        job = plan.job
        cut = plan.job.actor.training.cut
        sizes = (("TP", cut.tensor), ("PP", cut.pipeline), ("EP", cut.expert), ("DP", cut.data))
        rows.append(
            (
                f"`{name}`",
                _published(name),
                f"{job.machines.nodes} x {job.machines.devices_per_node} {job.machines.name}",
                " ".join(f"{short}{size}" for short, size in sizes if size > 1),
                f"{job.engines} x TP{job.engine.shape.tensor}",
                f"{plan.peak.peak / 1e9:.0f} of {plan.limit / 1e9:.0f} GB"
                + ("" if plan.fits else ", does not fit"),
                f"{plan.seconds:,.0f} s",
                f"{plan.bottleneck.name} {100 * plan.bottleneck.seconds / plan.seconds:.0f}%",
                f"{plan.device_hours:.1f}",
            )
        )
    return _HEAD + markdown(head, rows)
