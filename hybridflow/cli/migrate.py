"""`hybridflow migrate verl`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_actions, add_command
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.migrate.verl import Migration

MIGRATE = """\
examples:
  hybridflow migrate verl run_qwen3-8b.sh > my/qwen3-8b.yaml
  NNODES=4 hybridflow migrate verl run_qwen3-8b.sh trainer.test_freq=5     environment and arguments
  hybridflow migrate verl actor_rollout_ref.rollout.n=8 trainer.save_freq=20
  hybridflow migrate verl config.yaml                                      verl's Hydra config

The script is parsed, not run. The recipe is written to standard output; settings without an
equivalent, and changes needed before the run can start, to standard error. See docs/verl.md.
"""


def add(commands: Any) -> None:
    """Add the command and its action to the parser."""
    actions = add_actions(commands, "migrate", "write a recipe from verl's launch script", MIGRATE)
    verl = add_command(actions, "verl", "write a recipe from verl's script", MIGRATE, run_verl)
    verl.add_argument(
        "words", nargs="+", metavar="FILE|key=value", help="a script or YAML file, then settings"
    )
    verl.add_argument(
        "--needless", action="store_true", help="also list settings that are not needed here"
    )


def run_verl(args: argparse.Namespace) -> int:
    """Run `hybridflow migrate verl`."""
    from hybridflow.migrate.recipe import recipe
    from hybridflow.migrate.verl import migrate

    first, *rest = args.words
    is_file = "=" not in first
    notes: list[str] = []
    given = _of_file(Path(first), notes) if is_file else {}
    given |= _of_words(rest if is_file else args.words)
    if not given:
        raise ConfigError(f"{first}: no settings (key=value) found")
    found = migrate(given)
    text = recipe(found, Path(first).name if is_file else "verl's settings")
    print(text, end="")
    _report(found, notes, len(given), args.needless)
    return 0


def _of_file(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the settings in a script or YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"could not read {path}: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(path, text)
    from hybridflow.migrate.shell import command_of

    try:
        script = command_of(text, "main_ppo", {**os.environ, "PWD": str(Path.cwd())})
    except ValueError as error:
        raise ConfigError(f"{path}: could not parse this bash script: {error}") from error
    notes += dict.fromkeys(script.notes)
    if not script.words:
        raise ConfigError(
            f"{path}: no command that runs verl.trainer.main_ppo was found; pass its settings as "
            "key=value"
        )
    return _of_words([word for word in script.words if "=" in word and not word.startswith("-")])


def _of_yaml(path: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: expected a mapping of settings")
    return dict(_flat(tree, ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if str(name).startswith("_") or name in ("defaults", "hydra"):
            continue
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _of_words(words: Sequence[str]) -> dict[str, Any]:
    """Parse words of the form `key=value` as Hydra does and return the settings. Empty values are
    omitted."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            override = parser.parse_override(word)
            value = _plain(override.value())
        except HydraException:
            value = text  # a placeholder such as <path_to_model>
        if not name.startswith("~") and value != "":
            found[name.lstrip("+")] = value
    return found


def _plain(value: Any) -> Any:
    """Convert a value parsed by Hydra's grammar to plain Python values. Quoted strings lose their
    quotation marks."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(one) for key, one in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _report(found: Migration, notes: Sequence[str], total: int, with_needless: bool) -> None:
    """Print to stderr how complete the translation is and what remains for the user to do."""
    done = len(found.renamed) + len(found.needless)
    lines = [
        f"{done} of {total} settings translated ({len(found.needless)} of them not needed here)"
    ]
    lines += [f"  the script: {note}" for note in notes]
    lines += [f"  no equivalent: {name}: {reason}" for name, reason in found.missing.items()]
    if with_needless:
        lines += [f"  not needed: {name}: {reason}" for name, reason in found.needless.items()]
    lines += [f"  note: {text}" for text in found.remarks]
    print("\n".join(lines), file=sys.stderr)
