"""Functions that find recipes and list their names. Hydra is not imported, so listing is
instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Recipe:
    """A recipe in a configs folder: its name and the first line of its comment."""

    name: str
    summary: str


def shipped_dir(name: str) -> Path:
    """Return the folder `name` in the checkout or, if there is no checkout, in the installed
    package. Raises ConfigError if neither exists.
    """
    root = Path(__file__).resolve().parents[2]
    checkout = root / name
    # A site-packages folder may contain another package's "configs"; ours is next to setup.py.
    if checkout.is_dir() and (root / "setup.py").is_file():
        return checkout
    installed = Path(__file__).resolve().parents[1] / "shipped" / name
    if not installed.is_dir():
        raise ConfigError(f"{name} not found in {checkout} or {installed}; reinstall the package")
    return installed


def shipped_config_dir() -> Path:
    """Return the folder of the shipped recipes."""
    return shipped_dir("configs")


def config_dirs(extra: Path | None) -> list[Path]:
    """Return the folders to search, starting with the user's."""
    if extra is None:
        return [shipped_config_dir()]
    if not extra.is_dir():
        raise ConfigError(f"--config-dir {extra}: folder not found")
    return [extra.resolve(), shipped_config_dir()]


def list_recipes(dirs: list[Path]) -> list[Recipe]:
    """Return all recipes in `dirs`, keyed by name. A recipe shadows recipes of the same name in
    later folders."""
    found: dict[str, Recipe] = {}
    for folder in dirs:
        for path in sorted(filter(Path.is_file, folder.glob("*.yaml"))):
            found.setdefault(path.stem, Recipe(path.stem, _summary(path)))
    return sorted(found.values(), key=lambda recipe: recipe.name)


def model_groups(dirs: list[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name, sizes) for each file in the group `model` in `dirs` that defines model sizes."""
    import yaml

    files: list[Path] = []
    for folder in dirs:
        files += (folder / "model").glob("*.yaml")
    for path in sorted(files):
        if sizes := (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("hf_config"):
            yield path.stem, sizes


def require_recipe(name: str, dirs: list[Path]) -> str:
    """Return the recipe's name without suffix. Raises a ConfigError that lists the recipes whose
    names contain this one, or all recipes, if it is not in `dirs`."""
    stem = name.removesuffix(".yaml")
    names = [recipe.name for recipe in list_recipes(dirs)]
    if stem in names:
        return stem
    searched = f"(searched {', '.join(map(str, dirs))}; `hybridflow train` lists the recipes)"
    alike = [known for known in names if stem and stem in known]
    if alike:
        raise ConfigError(
            f"recipe {name} not found; did you mean one of {', '.join(alike)}? {searched}"
        )
    hint = did_you_mean(stem, names) or "."
    raise ConfigError(
        f"recipe {name} not found{hint} Available: {', '.join(names) or 'none'} {searched}"
    )


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("#"):
                return line.lstrip("#").strip()
            if line.strip():
                break
    return ""
