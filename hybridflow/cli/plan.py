"""`hybridflow plan`: estimates memory, time and placement of a recipe without allocating a device;
and `hybridflow reshard plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_actions, add_command, add_recipe, say
from hybridflow.errors import ConfigError, naming
from hybridflow.observe.jsonl import finite

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig
    from hybridflow.planning.devices import Machines
    from hybridflow.planning.job import Assumed
    from hybridflow.planning.plan import Plan

PLAN = """\
examples:
  hybridflow plan --config-name grpo-qwen3-30b-a3b-4x8
  hybridflow plan --config-name grpo-qwen3-30b-a3b-4x8 actor.parallel.expert=4 --mean-response 3000
  hybridflow plan --config-name grpo-kimi-k2-256x8 --transfer     also plan the weight sync
  hybridflow plan --config-name my-recipe --cluster cluster.yaml  your own device, nodes and links
  hybridflow plan --config-name ppo-qwen3-8b-1x8 --cluster cluster.yaml --auto --write mapped.yaml
  hybridflow plan --published                                     published runs and our predictions

No GPU and no weights are needed. docs/planning.md describes the cost model and how well it agrees
with published runs.
"""
RESHARD = """\
example:
  hybridflow reshard plan --model kimi-k2 --engines 32xtp=32,ep=32 \\
    --trainer ranks=2048,tp=8,pp=16,ep=32,first=3,last=2

Plans the transfer on this machine without a GPU, engine or weights. MODEL is a folder with a
config.json, such a file, or the name of a published model in configs/model/. Trainer sizes: ranks,
tp, pp, vpp, cp, ep, etp, first and last (layers of the first and last pipeline stage). Engine
sizes: tp, ep, dpa (data-parallel attention), pp, and dense=1 if dense MLPs and shared experts are
replicated on every rank (--moe-dense-tp-size 1 and an --moe-a2a-backend). A prefix NUMBERx sets the
number of such engines; --engines may be repeated.
"""


def add(commands: Any) -> None:
    """Add the commands `plan` and `reshard plan`. The latter uses the same flags to plan a transfer
    without a recipe.
    """
    plan = add_command(
        commands,
        "plan",
        "memory, time and placement of a recipe, before anything starts",
        PLAN,
        run,
    )
    add_recipe(plan, "name of a recipe; `hybridflow train` lists them")
    add = plan.add_argument
    add("--cluster", type=Path, metavar="FILE", help="YAML: device, nodes, devices_per_node, ...")
    add("--device", metavar="NAME", help="kind of device, overriding cluster.device")
    add(
        "--mean-prompt",
        type=float,
        metavar="TOKENS",
        help="default: half of data.max_prompt_length",
    )
    add(
        "--mean-response",
        type=float,
        metavar="TOKENS",
        help="default: half of data.max_response_length",
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write an HTML page with the memory of each phase and the schedule of a step",
    )
    add("--transfer", action="store_true", help="also plan and simulate the weight sync (seconds)")
    add("--auto", action="store_true", help="find the placement and layouts with the shortest step")
    add(
        "--overlap",
        action="store_true",
        help="with --auto, also consider separate engines that generate during training",
    )
    add("--published", action="store_true", help="compare the planner with published runs")
    add(
        "--recipes", action="store_true", help="plan all recipes for GPU clusters (docs/recipes.md)"
    )
    _add_transfer(plan, is_required=False)
    actions = add_actions(
        commands, "reshard", "transfer of weights from trainer to engines", RESHARD
    )
    transfer = add_command(
        actions, "plan", "plan, verify and simulate one weight sync", RESHARD, run_transfer
    )
    _add_transfer(transfer, is_required=True)


def run(args: argparse.Namespace) -> int:
    """Run `hybridflow plan`."""
    if args.published or args.recipes:
        from hybridflow.planning import accuracy, recipes

        print(accuracy.table() if args.published else recipes.document())
        return 0
    if args.model or args.trainer or args.engines:
        if not (args.model and args.trainer and args.engines):
            raise ConfigError(
                "a transfer without a recipe requires --model, --trainer and --engines"
            )
        return run_transfer(args)
    if args.config_name is None:
        raise ConfigError(
            "--config-name is missing; `hybridflow train` without arguments lists the recipes"
        )
    return _run_recipe(args)


def _run_recipe(args: argparse.Namespace) -> int:
    from hybridflow.config.hub import located
    from hybridflow.config.load import load_config
    from hybridflow.planning import advice
    from hybridflow.planning.devices import read_cluster
    from hybridflow.planning.job import Assumed
    from hybridflow.planning.policies import make_plans
    from hybridflow.planning.table import table
    from hybridflow.planning.transfer import transfer_of

    config: RunConfig = located(load_config(args.config_name, args.overrides, args.config_dir))
    if found := advice.refused(config):
        raise ConfigError("\n".join(found))
    cluster = config.cluster
    each = cluster.devices_per_node or cluster.procs_per_node
    machines: Machines = read_cluster(
        args.cluster, cluster.nodes, each, args.device or cluster.device
    )
    for option, value in (
        ("--mean-prompt", args.mean_prompt),
        ("--mean-response", args.mean_response),
    ):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{option} must be a number of tokens above 0, got {value:g}")
    assumed = Assumed(args.mean_prompt, args.mean_response)
    hf = _sizes(config)
    if args.auto:
        return _run_auto(args, config, machines, assumed, hf)
    plan, further = make_plans(config, machines, assumed, _sizes)
    transfer = transfer_of(config, hf, args.link_gbps) if args.transfer else None
    name = args.config_name.removesuffix(".yaml")
    change = (
        None if plan.fits or args.json else advice.nearest_change(config, machines, assumed, hf)
    )
    text = table(plan, name, change)
    for role, own in further.items():
        where = "in separate processes"
        if config.roles[role].base is not None:
            where = "adapters that share the policy's ranks and base weights"
        text += f"\n\nAdditional policy {role}, {where}\n{table(own, f'roles.{role}')}"
    _write_page(args, name, plan, text)
    if args.json:
        figures = plan.figures() | ({"transfer": transfer.figures()} if transfer else {})
        if further:
            figures["roles"] = {role: own.figures() for role, own in further.items()}
        print(json.dumps(finite(figures), indent=2))
        return 0
    say(text)
    if transfer is not None:
        from hybridflow.reshard.report import table as transfer_table

        say(f"\nWeight sync\n{transfer_table(transfer)}")
    return 0


def _run_auto(
    args: argparse.Namespace, config: RunConfig, machines: Machines, assumed: Assumed, hf: Any
) -> int:
    from hybridflow.planning import advice, autoplan
    from hybridflow.planning.job import job_of
    from hybridflow.planning.plan import make_plan
    from hybridflow.planning.table import table

    change, mapped = autoplan.auto(config, machines, assumed, hf, args.overlap)
    chosen: RunConfig = advice.with_values(config, change)
    recipe = autoplan.recipe(args.config_name.removesuffix(".yaml"), change)
    if args.write is not None:
        with naming(args.write):
            args.write.write_text(recipe, encoding="utf-8")
    pools = []
    for pool, size in zip(mapped.pools, mapped.devices, strict=True):
        names = ", ".join(name for name, _ in pool)
        pools.append(f"{names} on {size}")
    plan = make_plan(job_of(chosen, machines, assumed, hf))
    text = table(plan, args.config_name)
    _write_page(args, args.config_name.removesuffix(".yaml"), plan, text)
    if args.json:
        print(
            json.dumps(
                finite(plan.figures() | {"settings": change, "mapped_seconds": mapped.seconds}),
                indent=2,
            )
        )
        return 0
    say(f"{' | '.join(pools)}: {mapped.seconds:,.1f} s per step\n\n{recipe}\n{text}")
    return 0


def _write_page(args: argparse.Namespace, name: str, plan: Plan, text: str) -> None:
    if args.html is not None:
        from hybridflow.observe.report import write_plan

        write_plan(args.html, name, "fits" if plan.fits else "does not fit", plan.figures(), text)


def _sizes(config: RunConfig) -> dict[str, Any]:
    """Return the policy's Hugging Face config, using the tokenizer's vocabulary size if the recipe
    does not specify one."""
    from hybridflow.config import derived
    from hybridflow.config.outside_json import read_outside_json

    sizes = dict(derived.run_hf_config(config))
    if "vocab_size" not in sizes and config.model.tokenizer is not None:
        try:
            values = read_outside_json(Path(config.model.tokenizer) / "tokenizer.json")
            sizes["vocab_size"] = len(values["model"]["vocab"]) + len(
                values.get("added_tokens", ())
            )
        except (OSError, ValueError, KeyError, TypeError):
            pass  # `job_of` reports what is missing
    return sizes


def run_transfer(args: argparse.Namespace) -> int:
    """Run `hybridflow reshard plan`, or `hybridflow plan` with the same flags."""
    from hybridflow.models.layout import ParallelShape
    from hybridflow.planning.transfer import dry_run
    from hybridflow.reshard import report
    from hybridflow.reshard.engine_layouts import EngineShape

    trainer = report.build(ParallelShape, args.trainer)
    engines = [report.build(EngineShape, text) for text in args.engines]
    dtypes = (args.dtype, args.engine_dtype)
    staging = args.staging_mib << 20
    made = dry_run(
        report.read_config(args.model), trainer, engines, dtypes, staging, args.link_gbps
    )
    if args.write is not None:
        with naming(args.write):
            args.write.write_text(json.dumps(made.plan.to_dict()), encoding="utf-8")
    say(json.dumps(finite(made.figures()), indent=2) if args.json else report.table(made))
    return 0


def _add_transfer(parser: argparse.ArgumentParser, is_required: bool) -> None:
    add = parser.add_argument
    dtypes = ("bfloat16", "float16", "float32")
    without = "" if is_required else "without a recipe: "
    model = f"{without}name of a published model, or path of a config.json or its folder"
    add("--model", required=is_required, metavar="MODEL", help=model)
    add(
        "--trainer",
        required=is_required,
        metavar="SIZES",
        help=f"{without}for example ranks=256,tp=8,pp=8,ep=32",
    )
    engines = f"{without}for example 2xtp=16,ep=16; may be repeated"
    add("--engines", required=is_required, action="append", metavar="SIZES", help=engines)
    add(
        "--dtype",
        default="bfloat16",
        choices=dtypes,
        help=f"{without}dtype of the weights (default: bfloat16)",
    )
    engine_dtype = (
        f"{without}dtype of the engines' weights (default: same as --dtype); fp8 is block-wise, "
        "and its scales are sent too"
    )
    add("--engine-dtype", choices=(*dtypes, "fp8"), help=engine_dtype)
    staging = f"{without}memory per rank for messages in flight (default: 1024)"
    add("--staging-mib", type=int, default=1024, metavar="MIB", help=staging)
    add(
        "--link-gbps",
        type=float,
        default=400.0,
        metavar="GBPS",
        help="bandwidth of a rank's link in one direction (default: 400)",
    )
    add("--json", action="store_true", help="print the figures as JSON")
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the recipe (with --auto), or the transfer plan",
    )
