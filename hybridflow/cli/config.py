"""`hybridflow config keys | schema`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hybridflow.cli.command import add_actions, add_command

CONFIG = """\
examples:
  hybridflow config keys actor.optim              type, default and meaning of each key of a group
  hybridflow config keys                          all keys
  hybridflow config schema > configs/schema.json  for editors: completion and checking of recipes
"""


def add(commands: Any) -> None:
    """Add the command and its two actions to the parser."""
    actions = add_actions(commands, "config", "explain the keys of a configuration", CONFIG)
    keys = add_command(actions, "keys", "print type, default and meaning of keys", CONFIG, run_keys)
    keys.add_argument(
        "prefix", nargs="?", default="", metavar="KEY", help="a key or group (default: all keys)"
    )
    add_command(actions, "schema", "print the JSON schema of recipes", CONFIG, run_schema)


def run_keys(args: argparse.Namespace) -> int:
    """Run `hybridflow config keys`."""
    from hybridflow.config.build import to_plain
    from hybridflow.config.keys import all_keys, description, require_key, value_at
    from hybridflow.config.schema import RunConfig

    if args.prefix:
        require_key(RunConfig, args.prefix)
    for key, kind in all_keys(RunConfig):
        if f"{key}.".startswith(f"{args.prefix}." if args.prefix else ""):
            wanted = " | ".join(kind.choices) or " ".join([str(kind), *map(str, kind.bounds)])
            default = json.dumps(to_plain(value_at(RunConfig(), key)))
            meaning = description(RunConfig, key)
            print(f"{key} = {default}  ({wanted})" + (f"\n    {meaning}" if meaning else ""))
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Run `hybridflow config schema`."""
    from hybridflow.config.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=1))
    return 0
