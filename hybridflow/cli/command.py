"""Code shared by all commands: creating parsers, adding options that select a recipe, and running a
job."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ConfigError
from hybridflow.observe.printable import printable
from hybridflow.process.extras import KERNELS, require
from hybridflow.process.importing import without_collection
from hybridflow.process.obstacles import require_none

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig
    from hybridflow.trainer.preload import Preload

_PORTS = 65536

Handler = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, summary: str, epilog: str, handler: Handler | None
) -> argparse.ArgumentParser:
    """Add a command's parser to `commands`. `handler` is None for a command that has
    subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,  # new options would change the meaning of abbreviations
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
    )
    parser.set_defaults(handler=handler)
    return parser


def add_actions(commands: Any, name: str, summary: str, epilog: str) -> Any:
    """Add a command that requires one of several actions. Returns the object to which the actions
    must be added."""
    group = add_command(commands, name, summary, epilog, None)
    return group.add_subparsers(metavar="ACTION", required=True)


def add_recipe(parser: argparse.ArgumentParser, about: str, *aliases: str) -> None:
    """Add --config-name, --config-dir and arguments for settings that override the recipe."""
    parser.add_argument("--config-name", *aliases, metavar="NAME", help=about)
    parser.add_argument(
        "--config-dir",
        type=Path,
        metavar="DIR",
        help="a folder with your own recipes and groups, searched first",
    )
    add_overrides(parser, "settings that override the recipe's")


def add_overrides(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the arguments key=value, with their help text."""
    # without a default, argparse would list them among the required arguments
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=about)


def require_run_folder(run_dir: Path) -> None:
    """Raise ConfigError unless a job has written to this folder."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run folder")
    if not any(
        (run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "summary.json")
    ):
        raise ConfigError(
            f"{run_dir} is not a run folder: config.yaml, metrics.jsonl and summary.json not "
            "found; pass a folder written by a job, for example runs/tiny-moe-grpo"
        )


def port_number(text: str) -> int:
    """Parse a port number."""
    if not text.isascii() or not text.isdigit() or not int(text[:9]) < _PORTS:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 65535, got {text!r}")
    return int(text[:9])


def say(text: str) -> None:
    """Print text that may contain names and values from files, escaping control characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, errors="backslashreplace").decode(encoding), flush=True)


def say_error(text: object) -> None:
    """Print a message on stderr, escaping control characters."""
    print(f"hybridflow: {printable(str(text))}", file=sys.stderr, flush=True)


def warn(run: RunConfig) -> None:
    """Print warnings about values in a validated configuration that differ widely from published
    runs."""
    from hybridflow.config.habits import warnings

    for line in warnings(run):
        say_error(f"warning: {line}")


def run_job(job: str, run: RunConfig) -> None:
    """Run `train`, `sft` or `train-reward` with a validated configuration."""
    libraries = ("torch", "transformers", *(() if run.cluster.in_process else ("ray",)))
    require(KERNELS, *libraries)
    require_none((*libraries, "numpy", "pyarrow"))
    from hybridflow.config.derived import generates
    from hybridflow.trainer.preload import Preload

    with Preload(run, with_engines=job == "train" and generates(run)) as preload:
        # imports torch while the servers are loading
        with without_collection():
            from hybridflow.models.check import check

            check(run, job)
            from hybridflow.trainer import app

            gc.freeze()  # later collections do not scan what has been imported

        if job == "train":
            app.train(run, preload)
        elif job == "sft":
            app.sft(run, preload)
        else:
            app.train_reward(run, preload)


@contextmanager
def starting_engines(run: RunConfig) -> Iterator[Preload]:
    """Yield fork servers that import the engines' library, for a command without a trainer."""
    libraries = ("torch", "transformers")
    require(*libraries)
    require_none((*libraries, "numpy", "pyarrow"))
    from hybridflow.trainer.preload import Preload

    with Preload(run, with_engines=True, with_ranks=False) as preload:
        yield preload


def new_folder(parent: Path, name: str) -> Path:
    """Create a folder: `name`, or `name.1` and so on if it exists."""
    number = 0
    while True:
        folder = parent / (name + (f".{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder
