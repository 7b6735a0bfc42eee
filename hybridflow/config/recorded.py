"""Loading of a run folder's configuration (`config.yaml`), with settings that override it. The
folder may come from another user, so only plain values are read, and code that they refer to runs
only if the user allows it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.outside_yaml import read_outside_yaml
from hybridflow.config.own_entries import code_of
from hybridflow.config.registry import is_user_entry
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError

RECORDED = "config.yaml"
_WITH_FILES = ("data", "model", "reward", "rollout")


def read_recorded(file: Path) -> dict[str, Any]:
    """Return the values of a run's configuration.

    Raises:
        ConfigError: the file is missing, or has a defaults list or interpolations, which no run
            writes and which could read environment variables.
    """
    try:
        text, values = read_outside_yaml(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{file.parent} is not a run folder: {file.name} not found") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a valid run configuration: {error}") from error
    if "defaults" in values or "${" in text:
        what = "a defaults list" if "defaults" in values else "an interpolation ${...}"
        raise ConfigError(f"{file} is not a valid run configuration: it contains {what}")
    return values


def load_values(values: Mapping[str, Any], words: Sequence[str]) -> RunConfig:
    """Build a configuration from plain values and settings that override them. The only recipes and
    groups used are the shipped ones.
    """
    import yaml

    from hybridflow.config.load import load_config

    with tempfile.TemporaryDirectory() as alone:
        text = yaml.safe_dump(dict(values), sort_keys=False)
        (Path(alone) / RECORDED).write_text(text, encoding="utf-8")
        return load_config(Path(RECORDED).stem, words, Path(alone))


def located_from_elsewhere(values: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Make a run's data, model, reward and rollout paths absolute, so that they can be found from
    any working directory. The run's working directory is inferred from the path of the run folder,
    which must end with `output_dir/name`. If it does not, because the folder has been moved, the
    values are returned unchanged.
    """
    below = Path(str(values.get("output_dir", ""))) / str(values.get("name", ""))
    parts = run_dir.resolve().parts
    if below.is_absolute() or parts[-len(below.parts) :] != below.parts:
        return dict(values)
    base = Path(*parts[: -len(below.parts)])
    found = dict(values)
    for section in _WITH_FILES:
        if section in found:
            found[section] = _absolute(found[section], base)
    return found


def _absolute(value: Any, base: Path) -> Any:
    if isinstance(value, Mapping):
        return {_absolute(name, base): _absolute(one, base) for name, one in value.items()}
    if isinstance(value, list):
        return [_absolute(one, base) for one in value]
    if not isinstance(value, str) or len(value) > 4096 or "\0" in value:
        return value
    path, _, name = value.rpartition(":") if is_user_entry(value) else (value, "", "")
    # a single word is a name, even if a file has the same name
    is_path = ("/" in path or "." in path) and not Path(path).is_absolute()
    if not is_path or not (base / path).exists():
        return value
    return f"{base / path}:{name}" if name else str(base / path)


def refuse_code(
    config: RunConfig, file: Path, words: Sequence[str], what: str, unused: Collection[str] = ()
) -> None:
    """Raise ConfigError if a command would execute code that only the run's configuration, and not
    the command line, refers to.

    Args:
        file: the run's configuration file, for the message.
        words: the settings on the command line.
        what: the command in words, such as "the replay".
        unused: keys or key prefixes that the command ignores.
    """
    given = {word.lstrip("+").partition("=")[0] for word in words}
    found = []
    for key, value in code_of(config):
        if key not in given and not key.startswith(tuple(unused)):
            found.append(f"{key}={value}")
    if found:
        raise ConfigError(
            f"{what} would run code that {file} refers to: {', '.join(found)}. Review it, and pass "
            "--run-code to allow it"
        )
