"""The two journeys of docs/design.md against a trace of a run: which files its processes enter in
one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from tests.arch.journeys import JOURNEYS, steps
from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hybridflow"
PROMPT, WEIGHT = JOURNEYS
# opens the sessions that later syncs use
FIRST_WEIGHTS = "The first weights on their way to an engine"
OF_BYTE = {"1": PROMPT, "2": WEIGHT, "3": FIRST_WEIGHTS}
# files of the package that the processes may enter, without `observe`; a design with fewer lowers
# these. Polls of background threads enter one or two now and then
MOST_FILES = {PROMPT: 72, WEIGHT: 38}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], set[str]]:
    """The files that step 2 of the main job entered, by journey and by how: in a call, or in a
    coroutine that goes on from an earlier step, such as the flow."""
    folder = tmp_path_factory.mktemp("journeys")
    entered = folder / "entered"
    entered.mkdir()
    (entered / "journey").write_bytes(b"\0")
    prepare("arithmetic", folder / "data", None, load_config("tiny-moe-grpo").data.prepare.options)
    words = [
        "--config-name=tiny-moe-grpo",
        f"data.prepare.out={folder / 'data'}",
        "sft.steps=0",
        "trainer.total_steps=3",
        "trainer.val_before_train=false",
        f"output_dir={folder}",
    ]
    site = {"TRACED": str(entered), "PYTHONPATH": str(Path(__file__).parent / "tracing")}
    with Run(folder / "output", "train", *words, site=site) as run:
        assert run.end(500) == 0, run.err[-3000:]
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in entered.glob("[0-9]*"):
        for line in file.read_text().splitlines():
            journey, how, name = line.split(" ", 2)
            path = Path(name)
            if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] != "observe":
                found[OF_BYTE[journey], how].add(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.parametrize("journey", JOURNEYS)
def test_the_document_names_files_that_the_run_enters(
    journey: str, traced: Mapping[tuple[str, str], set[str]]
) -> None:
    known = traced[journey, "call"] | traced[journey, "resume"]
    if journey == WEIGHT:
        known |= traced[FIRST_WEIGHTS, "call"]
    assert [file for file in steps(journey) if file not in known] == []


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_step_does_not_enter_more_files_than_before(
    journey: str, traced: Mapping[tuple[str, str], set[str]]
) -> None:
    found = sorted(traced[journey, "call"])
    assert len(found) <= MOST_FILES[journey], f"{len(found)} files: {found}"
