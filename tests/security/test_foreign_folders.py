"""Run folders of somebody else: each command ends with a result or one message, in bounded time and
memory, shows nothing of other files, and prints nothing that steers a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config.load import dump_yaml, load_config
from hybridflow.config.outside_yaml import read_outside_yaml
from hybridflow.observe.rollouts import dump_path
from tests.security.foreign import HOSTILE, SECRET, run_folder

FEW = ("pipes", "sparse", "links", "steering")
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# what the report, and verify of the checkpoint, say of it
SAID = {
    "deep": ("summary.json: not readable (nested too deeply)", "nested too deeply"),
    "deep_yaml": ("config.yaml: not readable (nested too deeply)", "all match the manifest"),
    "pipes": ("metrics.jsonl: not readable (not a regular file)", "not a regular file"),
    "sockets": ("config.yaml: not readable (not a regular file)", "not a regular file"),
    "endless": (
        "metrics.jsonl: not followed, because it links to a file outside",
        "not a regular file",
    ),
    "endless_and_expected": ("Rollouts of step 2", "policy/b is not a regular file"),
    "sparse": ("MiB of 1048576 MiB are shown", "larger than"),
    "sparse_and_expected": ("Rollouts of step 2", "but none of them are on disk"),
    "links": (
        "step_000001.parquet: not readable (not followed, because it links",
        "does not match its own hash",
    ),
    "manifest_lies": ("Rollouts of step 2", "manifest.json cannot be read (ValueError: layout is"),
    "huge_numbers": (
        "metrics.jsonl: skipped line 10, which is not a complete record",
        "all match the manifest",
    ),
    "twice": ("Rollouts of step 2", "duplicate key 'step'"),
    "encodings": ("config.yaml: not readable (not UTF-8 (byte 0))", "index.json has"),
    "steering": ("\\x1b]0;owned\\x07", "\\x1b]0;owned\\x07"),
    "bombs": (
        "config.yaml: not readable (aliases are not allowed",
        "index.json has 60000016 bytes",
    ),
    "many_records": ("metrics.jsonl: more than", "all match the manifest"),
    "wrong_content": (
        "Rollouts of step 2 (1 of 1 rows)",
        "has the right hash but does not contain",
    ),
}


def commands(run: Path) -> dict[str, list[str]]:
    return {
        "report": ["report", str(run)],
        "inspect": ["checkpoint", "inspect", str(run)],
        "verify": [
            "checkpoint",
            "verify",
            *map(str, sorted((run / "checkpoints").glob("global_step_1*"))[:1]),
        ],
        "replay": ["replay", str(run), "2"],
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.full) for kind in HOSTILE]
)
def test_a_folder_of_somebody_else_is_read_within_bounds(tmp_path: Path, kind: str) -> None:
    """Each command has 1 GiB and 5 s of the processor: with more, the process ends and there is no
    answer."""
    run = run_folder(tmp_path / "run")
    HOSTILE[kind](run)
    asked = commands(run)
    words = [sys.executable, "-m", "tests.security.read_foreign", *map(json.dumps, asked.values())]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, **one_thread}, check=False
    )
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


CODE = {
    "reward.path": "theirs.py",
    "rollout.agent.tools": "[theirs.py:calls]",
    "trainer.loggers": "[jsonl,theirs.py:Logs]",
    "data.dataset_class.path": "theirs.py",
    "model.family": "theirs.py:llama",
    "rollout.python": "theirs/python",
    "rollout.agent.mcp_servers": "{files: {command: [theirs]}}",
    "cluster.address": "theirs:6379",
}


def theirs(folder: Path, *words: str) -> Path:
    """A run folder whose steps to 3 have dumps and whose configuration is whole."""
    run = run_folder(folder)
    config = load_config("tiny-moe-grpo", ["data.prepare.task=null", *words])
    (run / "config.yaml").write_text(dump_yaml(config))
    shutil.copy(dump_path(run / "rollouts", 2), dump_path(run / "rollouts", 3))
    return run


def test_a_replay_names_all_code_that_it_would_run_and_waits_for_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(
        "open('trap', 'w').close()\ndef compute_score(**given): return 0.0\n"
    )
    run = theirs(tmp_path / "run", *(f"{key}={value}" for key, value in CODE.items()))
    assert main(["replay", str(run), "3"]) == 2
    said = capsys.readouterr().err
    for key in CODE:
        assert (
            f"{key}=theirs" in said
            or f"{key}.files=" in said
            or f'{key}={{"command": ["theirs"]}}' in said
        ), key
    assert (
        "pass --run-code" in said
        and not Path("trap").exists()
        and not any((run / "replay").iterdir())
    )


def test_code_on_the_command_line_needs_no_consent_and_consent_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each replay then ends at the checkpoint that the folder does not have."""
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text("def compute_score(**given): return 0.0\n")
    run = theirs(tmp_path / "run", "reward.path=theirs.py")
    for words in (["--run-code"], ["reward.path=theirs.py"]):
        files = ["data.train_files=[theirs.py]", "data.val_files=[]", "model.tokenizer=."]
        assert main(["replay", str(run), "3", *words, *files]) in (1, 2)
        said = capsys.readouterr().err
        assert "run code" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [grpo]\n", "it contains a defaults list"),
        ("name: ${oc.env:HOME}\n", "it contains an interpolation"),
        ("a: &a [1]\nb: *a\n", "aliases are not allowed"),
        ("- 1\n", "expected a mapping, got list"),
        ("name: [\n", r"not YAML \(line 2\)"),
    ],
)
def test_a_configuration_that_no_run_writes_is_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    run = run_folder(tmp_path / "run")
    (run / "config.yaml").write_text(text)
    assert main(["replay", str(run), "2"]) == 2
    assert re.search(
        rf"config\.yaml is not a valid run configuration: .*{message}", capsys.readouterr().err
    )


def test_a_group_in_a_run_folder_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = theirs(tmp_path / "run")
    (run / "cluster").mkdir()
    (run / "cluster" / "in-process.yaml").write_text("address: theirs:6379\n")
    main(["replay", str(run), "3", "cluster=in-process"])
    assert "theirs" not in capsys.readouterr().err.replace(str(run), "")


@pytest.mark.parametrize("name", ["tiny-moe-ppo", "grpo-qwen3-8b-1x8"])
def test_what_a_run_writes_can_be_replayed(tmp_path: Path, name: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(load_config(name)))
    text, values = read_outside_yaml(file)
    assert "${" not in text and "defaults" not in values
