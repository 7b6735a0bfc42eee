"""What the commands say when Slurm answers, does not know the job, or is down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.launch import slurm


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A `squeue` that runs these shell lines."""
    program = folder / "squeue"
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_job_that_slurm_has_forgotten_still_has_its_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    (tmp_path / "7").mkdir()
    line = '{"restart": 0, "outcome": "finished", "why": "finished", "checkpoint": "", "next": "done"}'
    (tmp_path / "7" / "attempts.jsonl").write_text(f"{line}\n")
    assert slurm.status("7", tmp_path).splitlines() == ["7 is not in Slurm's queue", "  start 0: finished, finished"]
    fake(tmp_path, monkeypatch, "echo '7 RUNNING, 2 nodes (n[1-2]), 0:10 of 1:00'")
    assert slurm.status("7", tmp_path).splitlines()[0] == "7 RUNNING, 2 nodes (n[1-2]), 0:10 of 1:00"


def test_a_slurm_that_is_down_is_not_taken_for_a_job_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, "echo Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(ResourceError, match="squeue: Unable to contact slurm controller"):
        slurm.status("7", tmp_path)
