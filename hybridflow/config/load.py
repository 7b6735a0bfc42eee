"""Loading of a recipe and command-line overrides into a `RunConfig`.

Hydra composes the YAML groups and parses the overrides. `build` then checks the result against the
schema. Hydra is used only through its compose API: it neither changes the working directory nor
creates folders.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.build import build, to_plain
from hybridflow.config.keys import require_key
from hybridflow.config.locate import config_dirs, require_recipe
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError

_ENTRY = "hybridflow_entry"
_FORCED = "++"  # Hydra's prefix for overriding a key that the YAML may or may not contain


def load_config(
    name: str, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> RunConfig:
    """Compose recipe `name` with `overrides` into a typed configuration.

    Args:
        name: file name of a recipe, with or without `.yaml`.
        overrides: `key=value` for any key of the schema, or `group=choice` for a folder under
            configs/.
        config_dir: your own folder of recipes and groups; searched before the shipped folder.

    Raises:
        ConfigError: unknown recipe, key or choice; wrong type; bad YAML; bad override syntax.
    """
    dirs = config_dirs(config_dir)
    recipe = require_recipe(name, dirs)
    return build(compose_plain(recipe, _normalised(overrides, dirs), dirs))


def dump_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML: a recipe without groups from which `load_config`
    restores an equal configuration."""
    import yaml

    return yaml.safe_dump(to_plain(config), sort_keys=False, default_flow_style=None, width=120)


def _normalised(overrides: Sequence[str], dirs: Sequence[Path]) -> list[str]:
    """Convert all overrides to Hydra's form. Raises a single ConfigError that lists every invalid
    override, because a command line written for another trainer may contain many.
    """
    accepted: list[str] = []
    refused: list[str] = []
    for item in overrides:
        try:
            accepted.append(normalise_override(item, dirs))
        except ConfigError as error:
            refused.append(str(error))
    if len(refused) > 1:
        lines = [f"{len(refused)} invalid settings:", *refused]
        if any("actor_rollout_ref." in line for line in refused):
            lines.append("`hybridflow migrate verl FILE` converts a verl script to a recipe")
        raise ConfigError("\n  ".join(lines))
    if refused:
        raise ConfigError(refused[0])
    return accepted


def normalise_override(text: str, dirs: Sequence[Path]) -> str:
    """Rewrite an override so that Hydra accepts it even if no YAML file contains its key.

    Hydra rejects such keys unless they are prefixed with `+`. The schema defines all keys, so the
    key is checked here and then set with `++`. Group choices (`algorithm=grpo`) are left to Hydra.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"override {text!r}: {reason}; write key=value, for example trainer.total_steps=3"
        ) from error
    key = parsed.key_or_group
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {text!r}: sweeps are not supported; set one value, or a list as {key}=[a,b]"
        )
    if parsed.package is not None or key.startswith("hydra."):
        raise ConfigError(
            f"override {text!r}: Hydra's own settings and @package are not supported here"
        )
    if "/" in key:
        return text
    value = parsed.value()
    choices = _group_choices(key, dirs)
    if not choices:  # a group need not be a section: configs/published/ sets keys of several
        require_key(RunConfig, key)
    if (
        choices
        and not isinstance(value, (str, dict))
        and not (value is None and parsed.is_delete())
    ):
        raise ConfigError(
            f"override {text!r}: {key} is a group; choose one of: {', '.join(choices)}, or "
            "override a key inside it"
        )
    if parsed.is_delete() or (choices and isinstance(value, str)):
        return text
    return _FORCED + text.lstrip("+")


def compose_plain(recipe: str, overrides: Sequence[str], dirs: Sequence[Path]) -> Any:
    """Compose the recipe with Hydra on top of the schema's defaults, resolve interpolations and
    return plain containers.

    Hydra needs a tenth of a second to compose groups, so the groups of a shipped recipe are
    composed once per process and keys are set in a copy. An override that deletes a key, and all
    overrides before it, are left to Hydra, which applies them in order.
    """
    import yaml
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    deleted = max(
        (index for index, item in enumerate(overrides, 1) if item.startswith("~")), default=0
    )
    later = [item for item in overrides[deleted:] if item.startswith(_FORCED)]
    composed = [
        *overrides[:deleted],
        *(item for item in overrides[deleted:] if not item.startswith(_FORCED)),
    ]
    try:
        config = (
            _of_shipped(recipe, composed, dirs[0])
            if len(dirs) == 1
            else _over_defaults(recipe, composed, dirs)
        )
        for given in OverridesParser.create().parse_overrides(later):
            # like Hydra
            OmegaConf.update(config, given.key_or_group, given.value(), force_add=True)
        _refuse_missing(OmegaConf.to_container(config, resolve=False))
        return OmegaConf.to_container(config, resolve=True)
    except yaml.YAMLError as error:
        raise ConfigError(_describe_yaml_error(error)) from error
    except RecursionError as error:
        raise ConfigError(
            f"recipe {recipe}: circular defaults lists: a recipe includes itself through another "
            "one; remove one of the entries"
        ) from error
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        wrong = next(filter(None, map(_file_problem, _files_meant(error, recipe, dirs))), "")
        raise ConfigError(wrong or f"recipe {recipe}: {_reason(error)}") from error


def _over_defaults(recipe: str, overrides: Sequence[str], dirs: Sequence[Path]) -> Any:
    """Compose on top of the schema's defaults, so that ${...} can refer to a key that no YAML file
    contains."""
    from hydra import compose
    from omegaconf import OmegaConf

    composed = _ask_hydra(
        lambda words: compose(_ENTRY, overrides=words), recipe, list(overrides), dirs
    )
    given = OmegaConf.to_container(composed, resolve=False)
    return OmegaConf.create(_merge(to_plain(RunConfig()), given))


def _of_shipped(recipe: str, overrides: Sequence[str], folder: Path) -> Any:
    """Compose from the shipped folder only. The result is cached until a file in it changes."""
    stats = [(file, file.stat()) for file in folder.rglob("*.yaml")]
    versions = tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    return copy.deepcopy(_kept(recipe, tuple(overrides), folder, versions))


@functools.lru_cache(maxsize=64)
def _kept(recipe: str, overrides: tuple[str, ...], folder: Path, versions: object) -> Any:
    return _over_defaults(recipe, overrides, [folder])


def _merge(defaults: Any, given: Any) -> Any:
    """Merge `given` into `defaults` recursively. Uses plain containers, because OmegaConf's own
    merge is slow."""
    if not isinstance(defaults, dict) or not isinstance(given, dict):
        return given
    return {**defaults, **{key: _merge(defaults.get(key), value) for key, value in given.items()}}


def files_of(
    recipe: str, overrides: Sequence[str], dirs: Sequence[Path]
) -> Iterator[tuple[Path, str]]:
    """Yield each file of a recipe with the key at which its content is inserted, in order of
    increasing precedence."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    def defaults_list(words: list[str]) -> Any:
        return (
            GlobalHydra.instance()
            .config_loader()
            .compute_defaults_list(_ENTRY, words, RunMode.RUN)
            .defaults
        )

    for part in _ask_hydra(
        defaults_list, recipe, [normalise_override(item, dirs) for item in overrides], dirs
    ):
        files = (folder / f"{part.config_path}.yaml" for folder in dirs)
        # Hydra's own files are not in our folders
        if (file := next(filter(Path.is_file, files), None)) is not None:
            yield file, part.package


def _ask_hydra(
    ask: Callable[[list[str]], Any], recipe: str, overrides: list[str], dirs: Sequence[Path]
) -> Any:
    """Configure Hydra to search these folders for recipes and groups, then call `ask` and return
    its result.
    """
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.errors import ConfigCompositionException

    # Hydra finds its primary config in one folder only. An in-memory entry that refers to the
    # recipe treats all folders alike, so that a user's group file also replaces the shipped one
    # under a shipped recipe.
    search = {"searchpath": [f"file://{folder}" for folder in dirs]}
    ConfigStore.instance().store(_ENTRY, {"defaults": [recipe, "_self_"], "hydra": search})
    with (
        warnings.catch_warnings(),
        initialize(config_path=None, job_name="hybridflow", version_base="1.3"),
    ):
        # a recipe is expected to come last
        warnings.filterwarnings("ignore", message=".*missing `_self_`")
        try:
            return ask(overrides)
        except ConfigCompositionException as error:
            # A group that is not in the recipe's defaults list must be added, not replaced; users
            # write `group=choice` for both.
            group = next(
                (
                    item
                    for item in overrides
                    if str(error).startswith(f"Could not override '{item.split('=')[0]}'")
                ),
                None,
            )
            if group is None:
                raise
            rest = [item for item in overrides if item != group]
    return _ask_hydra(ask, recipe, [*rest, f"+{group}"], dirs)


def _group_choices(key: str, dirs: Sequence[Path]) -> list[str]:
    choices = set()
    for folder in dirs:
        for file in (folder / key).glob("*.yaml"):
            choices.add(file.stem)
    return sorted(choices)


def _refuse_missing(values: Any) -> None:
    if missing := sorted(_missing(values)):
        raise ConfigError(
            f"this recipe requires {', '.join(missing)}: set "
            f"{' '.join(f'{key}=...' for key in missing)}"
        )


def _missing(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys whose value is `???`, OmegaConf's marker for a required value."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _missing(value, f"{prefix}.{key}" if prefix else str(key))
    elif values == "???":
        yield prefix


def _reason(error: Exception) -> str:
    """Return the message without Hydra's trailing hints. If the outer error is generic, use its
    innermost cause."""
    lines = [line.strip() for line in str(error).split("Config search path")[0].splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("object_type"))
    cause = str(error.__cause__ or "").strip()
    return text if not cause or cause in text else f"{text} ({cause.splitlines()[0]})"


def _files_meant(error: Exception, recipe: str, dirs: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that an error may refer to: the recipe's own files, then files in the user's
    folder that the message names. An encoding error names no file, so all files are candidates.
    """
    yield from (folder / f"{recipe}.yaml" for folder in dirs)
    for folder in dirs[:-1]:
        for path in sorted(folder.rglob("*.yaml")):
            name = str(path.relative_to(folder).with_suffix(""))
            if f"'{name}'" in str(error) or isinstance(error, UnicodeDecodeError):
                yield path


def _file_problem(path: Path) -> str:
    """Return the reason why a file can be neither a recipe nor a group, or an empty string if it
    may be one.
    """
    import yaml

    if not path.is_file():
        return ""
    try:
        node = yaml.compose(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return f"{path}: byte {error.start} (0x{byte:02x}) is not UTF-8; save the file as UTF-8"
    except yaml.YAMLError as error:
        return f"{path}: {_describe_yaml_error(error)}"
    if node is None or isinstance(node, yaml.MappingNode):
        return ""
    kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
    return (
        f"{path} is {kind}; a recipe is a mapping of keys, for example `trainer: {{total_steps: "
        "2}`"
    )


def _describe_yaml_error(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    return (
        f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {what}"
        if mark
        else f"not valid YAML: {what}"
    )
