"""Sites that are not like ours: the smallest run passes in each, or is refused before anything
starts with what to change."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
SMALL = (
    *(
        "actor=tiny",
        "rollout=tiny",
        "trainer.total_steps=2",
        "trainer.export=false",
        "trainer.report=false",
    ),
    *(
        "data.train_batch_size=2",
        "rollout.n=2",
        "trainer.val_before_train=false",
        "trainer.test_every_steps=0",
    ),
)
PROXY = "http://127.0.0.1:9"
PLACES = {"one-engine": "cluster=one-process", "in-process": "cluster=in-process"}
Site = Mapping[str, str | None]

# name -> the environment; {here} is a folder of the test's own
PASSES: dict[str, Site] = {
    "no-home": {"HOME": None},
    "home-that-cannot-be-written": {"HOME": "/proc"},
    "no-locale": {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": None},
    "long-tmpdir": {"TMPDIR": "{here}/" + "x" * 90},
    "missing-tmpdir": {"TMPDIR": "{here}/missing"},
    "proxy": dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"), PROXY)
    | {"no_proxy": None},
    "ray-address": {"RAY_ADDRESS": "127.0.0.1:9"},
    "modules-in-the-working-directory": {},
}
REFUSED: dict[str, tuple[Site, str]] = {
    "another-ray": (
        {"PYTHONPATH": "{here}/other"},
        "contains ray of unknown version, which shadows ray",
    ),
    "no-utf8": (
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "export LC_ALL=C.UTF-8",
    ),
}


@pytest.fixture
def here() -> Iterator[Path]:
    """A working directory whose files hide modules of Python, with a short name: the sites count
    characters."""
    folder = Path(tempfile.mkdtemp(prefix="hft-site-", dir="/tmp"))
    (folder / ("x" * 90)).mkdir()
    (folder / "other" / "ray").mkdir(parents=True)
    (folder / "other" / "ray" / "__init__.py").write_text("raise RuntimeError('another ray')")
    for name in ("random", "token", "queue", "select", "statistics", "datasets"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} of the working directory')")
    yield folder
    shutil.rmtree(folder)


def at(site: Site, here: Path) -> Site:
    return {name: value and value.replace("{here}", str(here)) for name, value in site.items()}


def passes(tmp_path: Path, words: list[str], site: Site, here: Path) -> None:
    with Run(
        tmp_path / "output", "train", *words, *SMALL, f"output_dir={tmp_path}", site=site, cwd=here
    ) as run:
        assert run.end(240) == 0, run.out + run.err
        assert run.left_behind() == []
    assert json.loads((tmp_path / "e2e" / "summary.json").read_text())["steps"] == 2
    assert [path.name for path in (here / ("x" * 90)).glob("hf-*")] == []


def test_all_that_passes_at_once(tmp_path: Path, settings: list[str], here: Path) -> None:
    together: Site = {name: value for site in PASSES.values() for name, value in site.items()}
    together = {**together, "HOME": None, "TMPDIR": PASSES["long-tmpdir"]["TMPDIR"]}
    passes(tmp_path, [*settings, "cluster=one-process"], at(together, here), here)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("site", PASSES)
def test_a_site_that_passes(
    tmp_path: Path, settings: list[str], here: Path, site: str, place: str
) -> None:
    passes(tmp_path, [*settings, PLACES[place]], at(PASSES[site], here), here)


@pytest.mark.parametrize("name", REFUSED)
def test_a_site_that_is_refused_before_anything_starts(
    tmp_path: Path, settings: list[str], here: Path, name: str
) -> None:
    site, said = REFUSED[name]
    words = [*settings, "cluster=one-process", *SMALL, f"output_dir={tmp_path}"]
    with Run(tmp_path / "output", "train", *words, site=at(site, here), cwd=here) as run:
        assert run.end(60) == 1, run.out + run.err
        assert (
            run.err.startswith("hybridflow: ") and said in run.err and "Traceback" not in run.err
        ), run.err
        assert len(run.seen) <= 2 and run.left_behind() == [], run.seen
    assert not (tmp_path / "e2e").exists()
