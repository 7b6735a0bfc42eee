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


def test_a_job_that_slurm_has_forgotten_still_has_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    (tmp_path / "7").mkdir()
    line = (
        '{"restart": 0, "outcome": "finished", "why": "finished", "checkpoint": "", "next": "done"}'
    )
    (tmp_path / "7" / "attempts.jsonl").write_text(f"{line}\n")
    assert slurm.status("7", tmp_path).splitlines() == [
        "7 is not in Slurm's queue",
        "  start 0: finished, finished",
    ]
    fake(tmp_path, monkeypatch, "echo '7 RUNNING, 2 nodes (n[1-2]), 0:10 of 1:00'")
    assert (
        slurm.status("7", tmp_path).splitlines()[0] == "7 RUNNING, 2 nodes (n[1-2]), 0:10 of 1:00"
    )


def test_a_slurm_that_is_down_is_not_taken_for_a_job_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, "echo Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(ResourceError, match="squeue: Unable to contact slurm controller"):
        slurm.status("7", tmp_path)


def test_a_machine_without_a_slurm_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's library prints four lines there."""
    lines = "fetch_config: DNS SRV lookup failed\nfatal: Could not establish a configuration source"
    fake(tmp_path, monkeypatch, f"echo '{lines}' >&2; exit 1")
    with pytest.raises(ResourceError, match=r"^squeue found no slurm\.conf .*SLURM_CONF$"):
        slurm.status("7", tmp_path)


def test_a_job_is_followed_before_it_has_written_anything_and_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question finds the job a little further: pending, running with output, at last not in
    the queue."""
    out = tmp_path / "out"
    (out / "7").mkdir(parents=True)
    monkeypatch.setattr(slurm, "_LOOK_S", 0.0)
    asked = tmp_path / "asked"
    output = out / "7.out"
    lines = (
        f'echo x >> {asked}; case $(wc -l < {asked}) in 1|2) echo "7 PENDING";; 3) echo "7 '
        'RUNNING";'
    )
    fake(tmp_path, monkeypatch, f"{lines} echo first >> {output};; *) echo last >> {output};; esac")
    assert "".join(slurm.follow("7", out)) == "first\nlast\n"
    fake(tmp_path, monkeypatch, "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert "".join(slurm.follow("7", out)) == "first\nlast\n"
    with pytest.raises(ResourceError, match=r"8 does not exist; pass the job ID"):
        list(slurm.follow("8", out))
