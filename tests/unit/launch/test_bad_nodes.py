"""Nodes that a preflight excluded are not asked for by later jobs of the site."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest

from hybridflow.launch.bad_nodes import described, excluded, remember
from hybridflow.launch.job import Job, render
from hybridflow.launch.site import Limits, Site


def test_what_one_job_excludes_the_next_avoids_until_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    site = Site(bad_nodes=str(path))
    assert excluded(site) == {} and excluded(Site()) == {}
    job = Job("a", ("train",), tmp_path, tmp_path, tmp_path)
    assert "--exclude" not in render(job, site)
    assert remember(path, {"n1": "no GPU", "n2": "its clock\nis off"}, "7") == ""
    old = {"node": "n3", "why": "old", "job": "1", "time": time.time() - 25 * 3600}
    with path.open("a") as file:
        file.write(json.dumps(old) + "\n")
    assert list(excluded(site)) == ["n1", "n2"]
    assert "#SBATCH --exclude=n1,n2\n" in render(job, site)
    assert f"BAD_NODES={path}\n" in render(job, site)
    assert list(excluded(Site(bad_nodes=str(path), limits=Limits(bad_node_hours=30)))) == [
        "n1",
        "n2",
        "n3",
    ]
    line = described(excluded(site))[0]
    assert re.fullmatch(r"not using n1: no GPU \(0\.0 hours ago, job 7; site\.bad_nodes\)", line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[" * 50_000,
        '{"node": "n1"}',
        '{"node": "n1 --wrap=x", "why": "a", "job": "1", "time": 9e9}',
        '{"node": "n1\\n#SBATCH --x", "why": "a", "job": "1", "time": 9e9}',
        '{"node": "-x", "why": "a", "job": "1", "time": 9e9}',
        '{"node": "n1", "why": "a", "job": "1", "time": "soon"}',
    ],
)
def test_lines_of_others_exclude_nothing_else_and_run_nothing(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad").write_text(line + "\n")
    assert excluded(Site(bad_nodes=str(tmp_path / "bad"))) == {}


def test_a_file_that_cannot_be_written_is_a_reason_and_no_error(tmp_path: Path) -> None:
    assert "could not be written: " in remember(tmp_path / "no" / "file", {"n1": "a"}, "1")


def test_lines_of_jobs_at_the_same_time_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    work = [
        threading.Thread(target=remember, args=(path, {f"n{i}": "x" * 200, f"m{i}": "y"}, str(i)))
        for i in range(40)
    ]
    for one in work:
        one.start()
    for one in work:
        one.join()
    assert len(excluded(Site(bad_nodes=str(path)))) == 80
