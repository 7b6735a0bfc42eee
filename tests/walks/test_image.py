"""The container images: the package is built from exactly the files that an image copies, and its
kernels are there."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.walks.package import ROOT, run, succeed, wheel_of

pytestmark = pytest.mark.slow
RECIPES = ("Dockerfile", "hybridflow.def")


def copied_by(recipe: Path) -> list[str]:
    """Sources of the COPY lines of a Dockerfile, or of the %files section of an apptainer
    definition."""
    text = recipe.read_text(encoding="utf-8")
    if recipe.suffix == ".def":
        section = text.partition("%files\n")[2].partition("\n\n")[0]
        return [line.split()[0] for line in section.splitlines()]
    return [
        name
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]


def image_of(names: Iterable[str], folder: Path) -> Path:
    folder.mkdir()
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def test_both_recipes_copy_the_same() -> None:
    one, other = (copied_by(ROOT / "launch/containers" / name) for name in RECIPES)
    assert sorted(one) == sorted(other)


@pytest.mark.parametrize("recipe", [RECIPES[0], pytest.param(RECIPES[1], marks=pytest.mark.full)])
def test_the_package_builds_from_what_an_image_copies(recipe: str, tmp_path: Path) -> None:
    image = image_of(copied_by(ROOT / "launch/containers" / recipe), tmp_path / "image")
    built = tmp_path / "wheel"
    built.mkdir()
    wheel = wheel_of(image, built)
    site = tmp_path / "site"
    words = ["--no-deps", "--disable-pip-version-check", "--target", str(site), str(wheel)]
    succeed([sys.executable, "-m", "pip", "install", "-q", *words], tmp_path)
    asked = (
        "import sys; sys.path.insert(0, 'site'); import hybridflow_kernels as kernels, hybridflow "
        "as package; "
    )
    asked += "print(kernels.__file__, package.__file__)"
    kernels, package = succeed([sys.executable, "-c", asked], tmp_path).split()
    assert kernels == str(site / "hybridflow_kernels/__init__.py") and package == str(
        site / "hybridflow/__init__.py"
    )


def test_an_image_without_the_kernels_is_not_built_and_names_what_to_copy(tmp_path: Path) -> None:
    names = set(copied_by(ROOT / "launch/containers/Dockerfile")) - {"kernels"}
    image = image_of(sorted(names), tmp_path / "image")
    words = [
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-w",
        str(tmp_path),
        str(image),
    ]
    done = run([sys.executable, "-m", "pip", "wheel", *words], tmp_path)
    assert done.returncode != 0
    assert (
        "missing here: kernels; copy them, as launch/containers/Dockerfile does"
        in done.stdout + done.stderr
    )
