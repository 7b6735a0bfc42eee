"""`hybridflow train | sft | train-reward | prepare | eval | serve | report | watch | track |
replay | timeline | plan | reshard | checkpoint | slurm | doctor | bench | migrate | config |
version`.

Handlers import their dependencies when they run, because `--help` must be instant and must work
even if torch, Ray or Hydra are broken.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridflow
from hybridflow.cli import (
    bench,
    checkpoint,
    config,
    doctor,
    evaluate,
    migrate,
    plan,
    replay,
    serve,
    slurm,
    timeline,
    track,
    watch,
)
from hybridflow.cli.command import (
    Handler,
    add_command,
    add_overrides,
    add_recipe,
    require_run_folder,
    run_job,
    say,
    say_error,
    warn,
)
from hybridflow.config.keys import PREPARE_TASK
from hybridflow.config.registry import is_user_entry
from hybridflow.errors import ConfigError, HybridFlowError, StorageError, did_you_mean
from hybridflow.process.extras import missing_package
from hybridflow.process.memory_limit import memory_limit
from hybridflow.process.stopping import terminate_as_interrupt

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig

TOP = """\
Reinforcement learning for large language models: Megatron trains, engines generate, Ray starts the
processes.

examples:
  hybridflow train                                             list the recipes
  hybridflow train --config-name tiny-moe-grpo                 run the demo
  hybridflow train --config-name tiny-moe-grpo --print-config  print all settings, start nothing
  hybridflow train --config-name tiny-moe-grpo --explain       batch sizes and where they are set
  hybridflow plan --config-name grpo-qwen3-8b-1x8              memory and time of a step, no GPU
  hybridflow watch runs/tiny-moe-grpo                          its curves and samples, live
  hybridflow report runs/tiny-moe-grpo                         rewrite report.html
"""

JOB = """\
examples:
  hybridflow {job} --config-name tiny-moe-grpo
  hybridflow {job} --config-name tiny-moe-grpo trainer.total_steps=3 actor.optim.lr=1e-4
  hybridflow {job} --config-name tiny-moe-grpo algorithm=dr-grpo    a file of configs/algorithm/
  hybridflow {job} --config-dir my-configs --config-name my-recipe  your own recipes

Any configuration key can be overridden, whether or not the recipe sets it. Lists are written
key=[a,b], and null as null. Repeat the command to continue an interrupted run from its last
checkpoint (trainer.resume=disable starts over).
"""

PREPARE = """\
tasks:
{tasks}

examples:
  hybridflow prepare arithmetic --out data/arithmetic num_train=4000
  hybridflow prepare dapo_math 'evaluate=["aime24","aime25"]'  from the Hugging Face cache
  hybridflow prepare gsm8k --source downloads/gsm8k --out data/gsm8k
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. User errors are printed as one message without a
    traceback."""
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        handler: Handler = args.handler
        with terminate_as_interrupt():
            return handler(args)
    except HybridFlowError as error:
        if os.environ.get("HYBRIDFLOW_TRACEBACK") == "1":
            raise
        say_error(error)
        return error.exit_code
    except ModuleNotFoundError as error:
        message = missing_package(error)
        if message is None or os.environ.get("HYBRIDFLOW_TRACEBACK") == "1":
            raise
        say_error(message)
        return 2
    except KeyboardInterrupt:
        say_error("interrupted")
        return 130
    except BrokenPipeError:
        # The reader (head, less) has exited. Redirect stdout, because the interpreter would report
        # an error when flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        storage = StorageError.of(error)
        if storage is None or os.environ.get("HYBRIDFLOW_TRACEBACK") == "1":
            raise
        say_error(storage)
        return storage.exit_code


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. `key=value` words may come before, between and after options."""
    parser = build_parser()
    _require_command(parser, argv)
    args, rest = parser.parse_known_args(argv)
    words = [*getattr(args, "overrides", ()), *rest]
    bad = []
    for word in rest:
        if word.startswith("-") or not hasattr(args, "overrides"):
            bad.append(word)
    if bad and bad[0].startswith("-"):
        hint = _option_hint(parser, bad[0], argv)
        if not hint and hasattr(args, "overrides"):
            hint = "; settings are words without dashes: key=value"
        parser.error(f"unknown option {bad[0]}{hint}")
    if bad:
        parser.error(f"unexpected argument {bad[0]}")
    args.overrides = words
    return args


def _require_command(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """End with an error message if the first word is not a command."""
    [commands] = [
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        hint = did_you_mean(argv[0], commands)
        choice = f" (choose from {', '.join(commands)})"
        parser.error(f"unknown command {argv[0]}{hint or choice}")


def _option_hint(parser: argparse.ArgumentParser, word: str, argv: list[str]) -> str:
    """Return a hint for an unknown option: the setting of that name if there is one, or else the
    nearest option. Empty if neither exists.
    """
    from hybridflow.config.keys import exists
    from hybridflow.config.schema import RunConfig

    key, _, value = word.lstrip("-").partition("=")
    if "." in key or exists(RunConfig, key):
        value = value or next(iter(argv[argv.index(word) + 1 :]), "VALUE")
        return f"; settings are words without dashes: {key}={value}"
    name = word.partition("=")[0]
    options = sorted(set(_options(parser, argv)) - {"-h", "--help"})
    near = [one for one in options if one.startswith(name)] or difflib.get_close_matches(
        name, options, n=1, cutoff=0.75
    )
    return f"; did you mean {' or '.join(near)}?" if near and name.strip("-") else ""


def _options(parser: argparse.ArgumentParser, argv: list[str]) -> Iterator[str]:
    """Yield the options of a command and of the subcommands in the command line."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if name in argv:
                    yield from _options(command, argv)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        description=TOP,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"hybridflow {hybridflow.__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_job(commands, "train", "train a policy with reinforcement learning")
    _add_job(commands, "sft", "supervised training only, with the recipe's sft section")
    _add_job(
        commands,
        "train-reward",
        "train a reward model on pairs, with the recipe's reward_training section",
    )

    tasks = "\n".join(f"  {name:<12} {text}" for name, text in PREPARE_TASK.summaries().items())
    about = "write the parquet files of a task"
    prepare = add_command(commands, "prepare", about, PREPARE.format(tasks=tasks), run_prepare)
    prepare.add_argument("task", metavar="TASK", help=" | ".join(PREPARE_TASK.names()))
    prepare.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="folder with the raw files of a published dataset (default: the Hugging Face cache)",
    )
    prepare.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default: data/TASK)"
    )
    add_overrides(prepare, "options of the task")

    example = "example:\n  hybridflow report runs/tiny-moe-grpo\n"
    report = add_command(commands, "report", "write the HTML report of a run", example, run_report)
    report.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="a run folder, for example runs/tiny-moe-grpo"
    )
    for module in (
        evaluate,
        serve,
        watch,
        track,
        replay,
        timeline,
        plan,
        checkpoint,
        slurm,
        doctor,
        bench,
        migrate,
        config,
    ):
        module.add(commands)
    add_command(commands, "version", "print the version", "", run_version)
    return parser


def run_configured(args: argparse.Namespace, job: str) -> int:
    """Run `hybridflow train`, `sft` or `train-reward`."""
    if (run := _configured(args, job)) is not None:
        run_job(job, run)
    return 0


def run_prepare(args: argparse.Namespace) -> int:
    """Run `hybridflow prepare`."""
    names = PREPARE_TASK.names()
    if args.task not in names and not is_user_entry(args.task):
        hint = did_you_mean(args.task, names)
        raise ConfigError(
            f"unknown task {args.task}{hint} (choose one of {', '.join(names)}, or "
            "path/to/file.py:name)"
        )
    if args.source is not None and not args.source.exists():
        raise ConfigError(f"--source {args.source}: no such folder")
    out = args.out or Path("data") / args.task
    options = dict(map(_parse_option, args.overrides))
    from hybridflow.data.prepare import prepare

    done = prepare(args.task, out, args.source, options)
    counts = ", ".join(f"{name} ({rows} rows)" for name, rows in done.rows.items())
    made = f"{counts} and tokenizer/" if (done.folder / "tokenizer").is_dir() else counts
    print(f"{'already in place' if done.reused else 'written'}: {made} in {done.folder}")
    return 0


def run_report(args: argparse.Namespace) -> int:
    """Run `hybridflow report`."""
    require_run_folder(args.run_dir)
    from hybridflow.observe.report import write_report

    with memory_limit():
        say(str(write_report(args.run_dir)))
    return 0


def run_version(args: argparse.Namespace) -> int:
    """Run `hybridflow version`."""
    print(f"hybridflow {hybridflow.__version__}")
    return 0


def _configured(args: argparse.Namespace, job: str) -> RunConfig | None:
    """Return a job's validated configuration. If the command only prints text, print it and return
    None."""
    if args.config_name is None:
        if args.overrides or args.print_config or args.explain:
            name = next((word for word in args.overrides if "=" not in word), None)
            hint = f"did you mean --config-name {name}? " if name else ""
            raise ConfigError(
                f"--config-name is missing; {hint}`hybridflow {job}` without arguments lists the "
                "recipes"
            )
        _list_recipes(args, job)
        return None
    from hybridflow.config.load import dump_yaml, load_config

    run: RunConfig = load_config(args.config_name, args.overrides, args.config_dir)
    if args.print_config:
        print(dump_yaml(run), end="")
        return None
    from hybridflow.config.check import check
    from hybridflow.config.hub import located

    run = located(run)
    check(run, job)
    warn(run)
    if args.explain:
        from hybridflow.models.check import check as check_models

        check_models(run, job)
        from hybridflow.config.derived import run_hf_config
        from hybridflow.config.explain import Origins, explain
        from hybridflow.config.locate import config_dirs
        from hybridflow.planning.deadlines import StartAllowance

        recipe = args.config_name.removesuffix(".yaml")
        print(explain(run, Origins.find(recipe, args.overrides, config_dirs(args.config_dir))))
        if job == "train":
            print(f"\n{_epochs(run)}")
        print(f"\n{_placement(run, job)}")
        print(f"\n{_threads(run, job)}")
        print(f"\n{StartAllowance.of(run, run_hf_config(run)).describe(run)}")
        return None
    return run


def _epochs(run: RunConfig) -> str:
    """Describe the number of steps per epoch. Rows that will be dropped for being too long are
    still counted.
    """
    files = run.data.train_files
    batch = run.data.train_batch_size
    epochs = run.trainer.total_epochs
    if not files or not all(Path(file).is_file() for file in files):
        return "Epoch: unknown until data.train_files exist"
    from hybridflow.config import derived
    from hybridflow.data.files import count_rows

    rows = sum(map(count_rows, files))
    steps = derived.total_steps(run, rows) or 1
    given = f"trainer.total_steps {steps} = {steps * batch / max(rows, 1):,.2f} epochs"
    if epochs is not None:
        given = f"trainer.total_epochs {epochs} = {steps} steps"
    fits = "" if rows >= batch else "; error: a batch has more rows than the files"
    return (
        f"Epoch: {rows} rows of data.train_files / data.train_batch_size {batch} = "
        f"{rows / batch:,.1f} steps; {given} (before dropping rows that are too long){fits}"
    )


def _placement(run: RunConfig, job: str) -> str:
    from hybridflow.placement import preview

    if run.cluster.in_process:
        return "Placement: all roles in this process (cluster.in_process)"
    found = preview(run, job)
    if found is None:
        return (
            f"Placement: depends on the nodes at cluster.address={run.cluster.address} "
            "(cluster.devices_per_node is null)"
        )
    return found.describe()


def _threads(run: RunConfig, job: str) -> str:
    from hybridflow.device.platform import Platform
    from hybridflow.placement.threads import describe

    return describe(run, Platform.detect().cores if run.cluster.address is None else 1, job)


def _list_recipes(args: argparse.Namespace, job: str) -> None:
    from hybridflow.config.locate import config_dirs, list_recipes

    dirs = config_dirs(args.config_dir)
    recipes = list_recipes(dirs)
    width = max((len(recipe.name) for recipe in recipes), default=0)
    print(f"Recipes in {', '.join(map(str, dirs))}:\n")
    for recipe in recipes:
        print(f"  {recipe.name:<{width}}  {recipe.summary}".rstrip())
    print(f"\nRun one with: hybridflow {job} --config-name NAME [key=value ...]")


def _parse_option(word: str) -> tuple[str, Any]:
    """Parse `num_train=4000` to ("num_train", 4000). A value that is not a JSON literal stays a
    string."""
    key, found, text = word.partition("=")
    if not found or not key:
        raise ConfigError(
            f"options must have the form key=value, for example num_train=4000; got {word!r}"
        )
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def _add_job(commands: Any, name: str, summary: str) -> None:
    parser = add_command(
        commands, name, summary, JOB.format(job=name), partial(run_configured, job=name)
    )
    add_recipe(parser, "name of a recipe; if omitted, the recipes are listed")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the full resolved configuration as YAML and exit",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the batch sizes, how they multiply and where each is set, and exit",
    )


if __name__ == "__main__":
    sys.exit(main())
