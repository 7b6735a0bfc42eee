"""What the commands have in common: their parsers, and the options that choose a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Handler = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, summary: str, epilog: str, handler: Handler | None
) -> argparse.ArgumentParser:
    """The parser of a command among `commands`; a command with actions has no handler of its own."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
    )
    parser.set_defaults(handler=handler)
    return parser


def add_actions(commands: Any, name: str, summary: str, epilog: str) -> Any:
    """A command that needs one of several actions; returns what takes them, as `commands` takes commands."""
    group = add_command(commands, name, summary, epilog, None)
    return group.add_subparsers(metavar="ACTION", required=True)


def add_recipe(parser: argparse.ArgumentParser, about: str, *aliases: str) -> None:
    """--config-name, --config-dir, and settings that replace the recipe's."""
    parser.add_argument("--config-name", *aliases, metavar="NAME", help=about)
    parser.add_argument(
        "--config-dir", type=Path, metavar="DIR", help="a folder with recipes and groups of your own, searched first"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")
