"""The covering campaign of the matrix: an engine, a rank, a worker and Ray are lost in one run. Each
built-in flow loses a rank and its driver, and so does one of a user's own file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.config.registry import package_folder
from hybridflow.observe.jsonl import read_jsonl
from tests.faults import slurm_jobs
from tests.faults.campaign import problems_of_message
from tests.faults.faults import COMMON, ENDING, MORE, PHASES, STARTING, two_kills
from tests.faults.free_hand import CAMPAIGNS
from tests.faults.shapes import FLOWS, OWN_FLOW, SHAPES, STEPS

ROOT = Path(__file__).resolve().parents[2]


def played(folder: Path, *words: str) -> str:
    """What a campaign printed; it must have found no fault."""
    command = [sys.executable, "-m", "tests.faults", "--folder", str(folder), *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.full
def test_a_run_that_loses_its_parts_ends_like_one_that_was_left_alone(tmp_path: Path) -> None:
    assert played(tmp_path, "--cover").count(": ok\n") == 5


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("flow", FLOWS)
def test_each_flow_ends_as_if_its_rank_and_its_driver_had_not_been_killed(
    tmp_path: Path, flow: str
) -> None:
    out = played(tmp_path, "--two-kills", "--shape", FLOWS[flow])
    assert out.count(": ok\n") == 2 and "[driver]" in out and " rank 0]" in out
    summary = next(tmp_path.glob("undisturbed/*/out/e2e/summary.json"))
    assert json.loads(summary.read_text())["flow"] == flow


@pytest.mark.slow
@pytest.mark.full
def test_a_flow_of_the_users_on_four_ranks_ends_as_if_nothing_had_been_killed(
    tmp_path: Path,
) -> None:
    """Its multiplier is in the checkpoints, and moves."""
    out = played(tmp_path, "--two-kills", "--shape", "own flow")
    assert out.count(": ok\n") == 2 and "[driver]" in out and " rank " in out
    folder = next(tmp_path.glob("undisturbed/*/out/e2e"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["flow"] == f"{OWN_FLOW}:safe_rlhf" and "TP2·PP2" in summary["layout"]
    records = [one for one in read_jsonl(folder / "metrics.jsonl") if one["phase"] == "train"]
    assert len({one["flow/multiplier"] for one in records}) == STEPS
    assert len(OWN_FLOW.read_text().partition("@hf.flow")[2].splitlines()) <= 25


def test_every_built_in_flow_that_trains_loses_its_processes() -> None:
    files = {path.stem for path in package_folder("hybridflow.flows").glob("[a-z]*.py")}
    assert {*FLOWS} == files - {"base", "rollouts"} and {*FLOWS.values()} <= {*SHAPES}
    for shape in SHAPES:
        kills = two_kills(shape, 1)
        assert kills == two_kills(shape, 1) and kills[0].step < kills[1].step
        assert [kill.victims for kill in kills].count(("driver",)) == 1


def test_campaigns_by_hand_name_processes_and_moments_that_exist() -> None:
    moments = {*STARTING, *PHASES, *ENDING}
    for shape, faults in CAMPAIGNS:
        known = {*COMMON, *MORE.get(shape, ())}
        steps = [fault.step for fault in faults if fault.step]
        assert shape in SHAPES and steps == sorted(steps) and max(steps) < STEPS
        for fault in faults:
            assert fault.moment in moments and {*fault.victims} <= known
    drawn = slurm_jobs.draw(1)
    assert drawn == slurm_jobs.draw(1) != slurm_jobs.draw(2)
    assert [fault.step for fault in drawn] == list(range(STEPS))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("the same command resumes from /place/e2e/checkpoints/x", ""),
        ("a file of /place/e2e: No space left on device; free space, or choose another path", ""),
        (
            "a file: No space left on device; free space, or choose another path",
            "names no file or folder",
        ),
        (
            "a file: read-only; make it writable; the same command resumes",
            "names no file or folder",
        ),
        ("something went wrong in /place/e2e", "no remedy"),
        ("", "the words ''"),
    ],
)
def test_a_message_says_what_to_do_and_where(words: str, problem: str) -> None:
    found = problems_of_message(words, 1, Path("/place"))
    assert (problem in found[0]) if problem else found == []
