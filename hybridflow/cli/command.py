"""What the commands have in common: their parsers, the options that choose a recipe, and running
it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.extras import KERNELS, require
from hybridflow.config.outside_text import printable
from hybridflow.process.obstacles import require_none

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig

Handler = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, summary: str, epilog: str, handler: Handler | None
) -> argparse.ArgumentParser:
    """The parser of a command among `commands`; a command with actions has no handler of its
    own."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,  # what an abbreviation means changes with the next option
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
    )
    parser.set_defaults(handler=handler)
    return parser


def add_actions(commands: Any, name: str, summary: str, epilog: str) -> Any:
    """A command that needs one of several actions; returns what takes them, as `commands` takes
    commands."""
    group = add_command(commands, name, summary, epilog, None)
    return group.add_subparsers(metavar="ACTION", required=True)


def add_recipe(parser: argparse.ArgumentParser, about: str, *aliases: str) -> None:
    """--config-name, --config-dir, and settings that replace the recipe's."""
    parser.add_argument("--config-name", *aliases, metavar="NAME", help=about)
    parser.add_argument(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="a folder with recipes and groups of your own, searched first",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's"
    )


def say(text: str) -> None:
    """Print text with names and values from files, which cannot steer the terminal."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, errors="backslashreplace").decode(encoding), flush=True)


def say_error(text: object) -> None:
    """Print a message on stderr, likewise."""
    print(f"hybridflow: {printable(str(text))}", file=sys.stderr, flush=True)


def warn(run: RunConfig) -> None:
    """Print what of a checked configuration is far from the habit of published runs."""
    from hybridflow.config.habits import warnings

    for line in warnings(run):
        say_error(f"warning: {line}")


def run_job(job: str, run: RunConfig) -> None:
    """Run a checked configuration as `train`, `sft` or `train-reward`."""
    libraries = ("torch", "transformers", *(() if run.cluster.in_process else ("ray",)))
    require(KERNELS, *libraries)
    require_none((*libraries, "numpy", "pyarrow"))
    from hybridflow.config.derived import generates
    from hybridflow.trainer.preload import Preload

    with Preload(run, with_engines=job == "train" and generates(run)) as preload:
        # torch comes in here, while the servers load what they need
        from hybridflow.models.check import check

        check(run, job)
        from hybridflow.trainer import app

        if job == "train":
            app.train(run, preload)
        elif job == "sft":
            app.sft(run, preload)
        else:
            app.train_reward(run, preload)
