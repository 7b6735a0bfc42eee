"""The import contracts of pyproject.toml name rooms, every room is in them, and in the hall lie two
modules alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hybridflow"
HALL = {"errors", "dispatch"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]


def rooms() -> set[str]:
    """The names of the package's folders."""
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_contracts_name_rooms() -> None:
    layers = [contract for contract in CONTRACTS if contract["type"] == "layers"]
    for contract in layers:
        named = {
            name.removeprefix("hybridflow.")
            for row in contract["layers"]
            for name in re.findall(r"[\w.]+", row)
        }
        assert named <= rooms() | HALL, contract["id"]
        assert rooms() | HALL <= named | {"observe"}, contract["id"]
    assert len(layers) == 2


def test_the_hall_is_empty_but_for_what_crosses_rooms() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"} == HALL
