"""`hybridflow train | sft | train-reward | prepare | report | reshard | checkpoint | config | version`.

Handlers import what they need when they run: `--help` must answer at once and must work where torch, Ray or Hydra are
broken.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridflow
from hybridflow.cli import checkpoint, config
from hybridflow.config.keys import PREPARE_TASK
from hybridflow.config.registry import is_user_entry
from hybridflow.errors import ConfigError, HybridFlowError, StorageError
from hybridflow.process.stopping import terminate_as_interrupt

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig

OPTIONS = (
    *("--config-name", "--config-dir", "--print-config", "--explain", "--source", "--out"),
    *("--model", "--trainer", "--engines", "--staging-mib", "--link-gbps", "--json", "--write"),
    *checkpoint.OPTIONS,
)

TOP = """\
Reinforcement learning of large language models: Megatron trains, engines generate, Ray starts the processes.

examples:
  hybridflow train                                             list the recipes
  hybridflow train --config-name tiny-moe-grpo                 run the demo
  hybridflow train --config-name tiny-moe-grpo --print-config  show every setting, start nothing
  hybridflow train --config-name tiny-moe-grpo --explain       what the batch sizes mean, and who set them
  hybridflow report runs/tiny-moe-grpo                         write report.html again
"""

JOB = """\
examples:
  hybridflow {job} --config-name tiny-moe-grpo
  hybridflow {job} --config-name tiny-moe-grpo trainer.total_steps=3 actor.optim.lr=1e-4
  hybridflow {job} --config-name tiny-moe-grpo algorithm=dr-grpo         choose a file of configs/algorithm/
  hybridflow {job} --config-dir my-configs --config-name my-recipe       recipes of your own

Any key of the configuration can be overridden, whether or not the recipe mentions it; lists are written key=[a,b],
null is null. An interrupted run goes on from its last checkpoint when the same command is given again
(trainer.resume=disable starts anew).
"""

PREPARE = """\
tasks:
{tasks}

examples:
  hybridflow prepare arithmetic --out data/arithmetic num_train=4000
  hybridflow prepare gsm8k --source downloads/gsm8k --out data/gsm8k
"""

RESHARD = """\
example:
  hybridflow reshard plan --model kimi-k2 --trainer ranks=2048,tp=8,pp=16,ep=32,first=3,last=2 --engines 32xtp=32,ep=32

Plans the transfer on this machine: no GPU, no engine and no weights are needed. MODEL is a folder with a config.json,
such a file, or one of kimi-k2, deepseek-v3, qwen3-235b-a22b, qwen3-30b-a3b, llama-3.1-70b. Sizes of the trainer:
ranks, tp, pp, vpp, cp, ep, etp, first and last (layers of the first and last pipeline stage). Sizes of an engine: tp,
ep, dpa (data-parallel attention), pp, and dense=1 where dense MLPs and shared experts are whole on every rank
(--moe-dense-tp-size 1 and an --moe-a2a-backend); NUMBERx before them is the number of such engines, and --engines may
be given several times.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors a user can cause become one message without a traceback."""
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        handler: Callable[[argparse.Namespace], int] = args.handler
        with terminate_as_interrupt():
            return handler(args)
    except HybridFlowError as error:
        if os.environ.get("HYBRIDFLOW_TRACEBACK") == "1":
            raise
        print(f"hybridflow: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hybridflow: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone. Point stdout elsewhere, or the interpreter complains while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        storage = StorageError.of(error)
        if storage is None or os.environ.get("HYBRIDFLOW_TRACEBACK") == "1":
            raise
        print(f"hybridflow: {storage}", file=sys.stderr)
        return storage.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `key=value` words may stand before, between and after the options."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    words = [*getattr(args, "overrides", ()), *rest]
    bad = [word for word in rest if word.startswith("-") or not hasattr(args, "overrides")]
    if bad:
        near = difflib.get_close_matches(bad[0].split("=")[0], OPTIONS, n=1)
        parser.error(f"unknown option {bad[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    args.overrides = words
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="hybridflow", description=TOP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {hybridflow.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_job(commands, "train", "train a policy with reinforcement learning", run_train)
    _add_job(commands, "sft", "supervised training alone, on the recipe's sft section", run_sft)
    _add_job(
        commands,
        "train-reward",
        "train a reward model on pairs, the recipe's reward_training section",
        run_train_reward,
    )

    tasks = "\n".join(f"  {name:<12} {text}" for name, text in PREPARE_TASK.summaries().items())
    prepare = _add(
        commands,
        "prepare",
        "make the parquet files and the tokenizer of a task",
        PREPARE.format(tasks=tasks),
        run_prepare,
    )
    prepare.add_argument("task", metavar="TASK", help=" | ".join(PREPARE_TASK.names()))
    prepare.add_argument(
        "--source", type=Path, metavar="DIR", help="folder with the raw files, for tasks that need one"
    )
    prepare.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: data/TASK)")
    prepare.add_argument("overrides", nargs="*", metavar="key=value", help="options of the task")

    report = _add(
        commands,
        "report",
        "write the HTML report of a run",
        "example:\n  hybridflow report runs/tiny-moe-grpo\n",
        run_report,
    )
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run folder, for example runs/tiny-moe-grpo")
    reshard = _add(commands, "reshard", "how weights travel from trainer to engines", RESHARD, run_reshard_plan)
    _add_reshard_plan(reshard)
    checkpoint.add(commands, _add)
    config.add(commands, _add)
    _add(commands, "version", "print the version", "", run_version)
    return parser


def run_train(args: argparse.Namespace) -> int:
    """`hybridflow train`."""
    if (run := _configured(args, "train")) is not None:
        from hybridflow.trainer import app  # torch and Ray come in here, after the configuration is known to be good

        app.train(run)
    return 0


def run_sft(args: argparse.Namespace) -> int:
    """`hybridflow sft`."""
    if (run := _configured(args, "sft")) is not None:
        from hybridflow.trainer import app

        app.sft(run)
    return 0


def run_train_reward(args: argparse.Namespace) -> int:
    """`hybridflow train-reward`."""
    if (run := _configured(args, "train-reward")) is not None:
        from hybridflow.trainer import app

        app.train_reward(run)
    return 0


def run_prepare(args: argparse.Namespace) -> int:
    """`hybridflow prepare`."""
    names = PREPARE_TASK.names()
    if args.task not in names and not is_user_entry(args.task):
        near = difflib.get_close_matches(args.task, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"there is no task named {args.task}{hint} (choose one of {', '.join(names)}, or path/to/file.py:name)"
        )
    if args.source is not None and not args.source.exists():
        raise ConfigError(f"--source {args.source}: no such folder")
    out = args.out or Path("data") / args.task
    options = dict(_parse_option(word) for word in args.overrides)
    from hybridflow.data.prepare import prepare

    done = prepare(args.task, out, args.source, options)
    counts = ", ".join(f"{name} ({rows} rows)" for name, rows in done.rows.items())
    print(f"{'already in place' if done.reused else 'written'}: {counts} and tokenizer/ in {done.folder}")
    return 0


def run_report(args: argparse.Namespace) -> int:
    """`hybridflow report`."""
    if not args.run_dir.is_dir():
        raise ConfigError(f"{args.run_dir}: no such run folder")
    if not any((args.run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
        raise ConfigError(
            f"{args.run_dir} is not the folder of a run: it has no config.yaml, metrics.jsonl or summary.json; give a "
            "folder that a job wrote, for example runs/tiny-moe-grpo"
        )
    from hybridflow.observe.report import write_report

    print(write_report(args.run_dir))
    return 0


def run_reshard_plan(args: argparse.Namespace) -> int:
    """`hybridflow reshard plan`."""
    from hybridflow.models.fp8 import FP8
    from hybridflow.reshard import report
    from hybridflow.reshard.engine_layouts import EngineShape
    from hybridflow.reshard.layout import ParallelShape
    from hybridflow.reshard.simulate import Fabric

    trainer, engines = (
        report.build(ParallelShape, args.trainer),
        [report.build(EngineShape, text) for text in args.engines],
    )
    fabric, config = Fabric(link_gbps=args.link_gbps), report.read_config(args.model)
    engine_dtype = FP8 if args.engine_dtype == "fp8" else args.engine_dtype
    run = report.dry_run(config, trainer, engines, args.dtype, args.staging_mib << 20, fabric, engine_dtype)
    if args.write is not None:
        args.write.write_text(json.dumps(run.plan.to_dict()), encoding="utf-8")
    print(json.dumps(run.figures(), indent=2) if args.json else report.table(run))
    return 0


def run_version(args: argparse.Namespace) -> int:
    """`hybridflow version`."""
    print(f"hybridflow {hybridflow.__version__}")
    return 0


def _configured(args: argparse.Namespace, job: str) -> RunConfig | None:
    """The checked configuration of a job; None where the command asks for a text alone, which is then printed."""
    if args.config_name is None:
        if args.overrides or args.print_config or args.explain:
            raise ConfigError(f"--config-name is missing; `hybridflow {job}` alone lists the recipes")
        _list_recipes(args, job)
        return None
    from hybridflow.config.load import dump_yaml, load_config

    run: RunConfig = load_config(args.config_name, args.overrides, args.config_dir)
    if args.print_config:
        print(dump_yaml(run), end="")
        return None
    from hybridflow.config.check import check

    check(run, job)
    from hybridflow.models.check import check as check_models

    check_models(run, job)
    if args.explain:
        from hybridflow.config.explain import Origins, explain
        from hybridflow.config.locate import config_dirs

        recipe = args.config_name.removesuffix(".yaml")
        print(explain(run, Origins.find(recipe, args.overrides, config_dirs(args.config_dir))))
        print(f"\n{_placement(run, job)}")
        return None
    return run


def _placement(run: RunConfig, job: str) -> str:
    from hybridflow.placement import preview

    found = preview(run, job)
    if found is None:
        return (
            f"Placement: as the nodes at cluster.address={run.cluster.address} allow (cluster.devices_per_node is null)"
        )
    return found.describe()


def _list_recipes(args: argparse.Namespace, job: str) -> None:
    from hybridflow.config.locate import config_dirs, list_recipes

    dirs = config_dirs(args.config_dir)
    recipes = list_recipes(dirs)
    width = max((len(recipe.name) for recipe in recipes), default=0)
    print(f"Recipes in {', '.join(str(folder) for folder in dirs)}:\n")
    for recipe in recipes:
        print(f"  {recipe.name:<{width}}  {recipe.summary}".rstrip())
    print(f"\nRun one with: hybridflow {job} --config-name NAME [key=value ...]")


def _parse_option(word: str) -> tuple[str, Any]:
    """`num_train=4000` -> ("num_train", 4000); a value that is no JSON literal stays a string."""
    key, found, text = word.partition("=")
    if not found or not key:
        raise ConfigError(f"option {word!r}: write key=value, for example num_train=4000")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def _add(
    commands: Any, name: str, summary: str, epilog: str, handler: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    kwargs = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "help": summary,
        "description": description,
        "epilog": epilog,
    }
    parser: argparse.ArgumentParser = commands.add_parser(name, **kwargs)
    parser.set_defaults(handler=handler)
    return parser


def _add_reshard_plan(reshard: argparse.ArgumentParser) -> None:
    plan = _add(
        reshard.add_subparsers(metavar="ACTION", required=True),
        "plan",
        "plan, prove and simulate one weight sync",
        RESHARD,
        run_reshard_plan,
    )
    plan.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a published model's name, or the path of a config.json or its folder",
    )
    plan.add_argument("--trainer", required=True, metavar="SIZES", help="for example ranks=256,tp=8,pp=8,ep=32")
    plan.add_argument(
        "--engines", required=True, action="append", metavar="SIZES", help="for example 2xtp=16,ep=16; may be repeated"
    )
    plan.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of the weights (default: bfloat16)",
    )
    plan.add_argument(
        "--engine-dtype",
        choices=("bfloat16", "float16", "float32", "fp8"),
        help="of the engines' weights (default: as --dtype); fp8 is block-wise, its scales travel along",
    )
    plan.add_argument(
        "--staging-mib",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory for messages under way, a rank (default: 1024)",
    )
    plan.add_argument(
        "--link-gbps", type=float, default=400.0, metavar="GBPS", help="a rank's link, one direction (default: 400)"
    )
    plan.add_argument("--json", action="store_true", help="print the figures as JSON")
    plan.add_argument("--write", type=Path, metavar="FILE", help="write the plan itself as JSON")


def _add_job(commands: Any, name: str, summary: str, handler: Callable[[argparse.Namespace], int]) -> None:
    parser = _add(commands, name, summary, JOB.format(job=name), handler)
    parser.add_argument("--config-name", metavar="NAME", help="a recipe; without it, the recipes are listed")
    parser.add_argument(
        "--config-dir", type=Path, metavar="DIR", help="a folder with recipes and groups of your own, searched first"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the whole resolved configuration as YAML and stop"
    )
    parser.add_argument(
        "--explain", action="store_true", help="print how the batch sizes multiply and where each comes from, and stop"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")


if __name__ == "__main__":
    sys.exit(main())
