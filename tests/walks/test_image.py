"""The container images: the package is built from exactly the files that an image copies, and its kernels are there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.walks.package import ROOT, succeed, wheel_of

pytestmark = pytest.mark.slow


def copied_by(recipe: Path) -> list[str]:
    """Sources of the COPY lines of a Dockerfile, or of the %files section of an apptainer definition."""
    text = recipe.read_text(encoding="utf-8")
    if recipe.suffix == ".def":
        section = text.partition("%files\n")[2].partition("\n\n")[0]
        return [line.split()[0] for line in section.splitlines()]
    return [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]


@pytest.mark.parametrize("recipe", ["Dockerfile", "hybridflow.def"])
def test_the_package_builds_from_what_an_image_copies(recipe: str, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    for name in copied_by(ROOT / "launch/containers" / recipe):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, image / name)
    built = tmp_path / "wheel"
    built.mkdir()
    wheel = wheel_of(image, built)
    site = tmp_path / "site"
    words = ["--no-deps", "--disable-pip-version-check", "--target", str(site), str(wheel)]
    succeed([sys.executable, "-m", "pip", "install", "-q", *words], tmp_path)
    asked = "import sys; sys.path.insert(0, 'site'); import hybridflow_kernels as kernels, hybridflow as package; "
    asked += "print(kernels.__file__, package.__file__)"
    kernels, package = succeed([sys.executable, "-c", asked], tmp_path).split()
    assert kernels == str(site / "hybridflow_kernels/__init__.py") and package == str(site / "hybridflow/__init__.py")
