"""Run folders of somebody else: each command ends with a result or one message, in bounded time and memory, shows
nothing of other files, and prints nothing that steers a terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.foreign import HOSTILE, SECRET, run_folder

FEW = ("pipes", "sparse", "links", "steering", "wrong_content")
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# what the report, and verify of the checkpoint, say of it
SAID = {
    "deep": ("summary.json: cannot be read (nested too deeply)", "nested too deeply"),
    "deep_yaml": ("config.yaml: cannot be read (nested too deeply)", "all as the manifest says"),
    "pipes": ("metrics.jsonl: cannot be read (not a regular file)", "not a regular file"),
    "sockets": ("config.yaml: cannot be read (not a regular file)", "not a regular file"),
    "endless": ("metrics.jsonl: a link out of the run folder", "not a regular file"),
    "endless_and_expected": ("Rollouts of step 2", "policy/b is not a regular file"),
    "sparse": ("metrics.jsonl: has 1048576 MiB", "larger than"),
    "sparse_and_expected": ("Rollouts of step 2", "of which there are none on the disk"),
    "links": ("step_000001.parquet: cannot be read (a link out of the run folder", "hash differs"),
    "manifest_lies": ("Rollouts of step 2", "manifest.json cannot be read (ValueError: layout is"),
    "huge_numbers": ("metrics.jsonl: line 10 is no whole record", "all as the manifest says"),
    "twice": ("Rollouts of step 2", "the key 'step' is there twice"),
    "encodings": ("config.yaml: cannot be read (not UTF-8 (byte 0))", "index.json has"),
    "steering": ("\\x1b]0;owned\\x07", "\\x1b]0;owned\\x07"),
    "bombs": ("config.yaml: cannot be read (it has an alias", "index.json has 60000016 bytes"),
    "many_records": ("metrics.jsonl: holds more than", "all as the manifest says"),
    "wrong_content": ("rollouts/step_000002.parquet: cannot be read", "has its right hash and does not describe"),
}


def commands(run: Path) -> dict[str, list[str]]:
    return {
        "report": ["report", str(run)],
        "inspect": ["checkpoint", "inspect", str(run)],
        "verify": ["checkpoint", "verify", *map(str, sorted((run / "checkpoints").glob("global_step_1*"))[:1])],
        "replay": ["replay", str(run), "2"],
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.full) for kind in HOSTILE]
)
def test_a_folder_of_somebody_else_is_read_within_bounds(tmp_path: Path, kind: str) -> None:
    """Each command has 1 GiB and 5 s of the processor: with more, the process ends and there is no answer."""
    run = run_folder(tmp_path / "run")
    HOSTILE[kind](run)
    asked = commands(run)
    words = [sys.executable, "-m", "tests.security.read_foreign", *map(json.dumps, asked.values())]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **one_thread}, check=False)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
    answers = dict(zip(asked, json.loads(done.stdout).values(), strict=True))
    for name, (code, out, err) in answers.items():
        assert code in (0, 1, 2) and "Traceback" not in err, f"{name}: {code} {err}"
        assert (code != 0) == bool(err), f"{name}: {code} {err}"
        assert not STEERING.search(out + err) and SECRET not in out + err, f"{name}: {out} {err}"
    assert answers["report"][0] == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert not STEERING.search(page) and SECRET not in page
    of_report, of_verify = SAID[kind]
    assert of_report.replace("'", "&#39;") in page
    assert of_verify in "".join(answers["verify"][1:])
