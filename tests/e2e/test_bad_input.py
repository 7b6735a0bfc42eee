"""What a user can get wrong: one clear message, no traceback, an exit status, nothing left running
and nothing lost."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config.load import load_config
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.saving.manifest import Manifest, write_sealed
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
ONE_PROCESS = ("actor=tiny", "cluster=one-process", "rollout=tiny")


def message_of(run: Run, exit_code: int) -> str:
    """The run's complaint, after everything that holds for all of them."""
    assert run.end(200) == exit_code, run.out + run.err
    assert run.left_behind() == []
    assert (
        "Traceback" not in run.err and "Traceback" not in run.out.split("last lines of its log")[0]
    ), run.out + run.err
    assert run.err.count("hybridflow: ") == 1, run.err
    assert run.err.startswith("hybridflow: "), run.err
    return run.err


# ---- noticed before anything is started
# --------------------------------------------------------------------------------------------------

CASES = {
    "unknown-key": (("actor.optim.lrr=1",), r"actor\.optim\.lrr.*did you mean.*lr"),
    "world-size": (
        ("cluster.procs_per_node=3",),
        r"tensor=2 x pipeline=2 .* = 4 does not divide .* 3 processes",
    ),
    "model-size": (
        ("model.hf_config.num_hidden_layers=3",),
        r"num_hidden_layers is 3, .*\.pipeline 2",
    ),
    "batch": (
        ("data.train_batch_size=6", "actor.ppo_mini_batch_size=4"),
        r"train_batch_size=6 is not a multiple of .*ppo_mini_batch_size=4",
    ),
    "samples": (
        ("data.train_batch_size=1", "rollout.n=1", "cluster.procs_per_node=8"),
        r"1 samples per update cannot be divided evenly across 2",
    ),
    "fp8-on-a-cpu": (
        ("rollout.quantization=fp8", "model.dtype=bfloat16"),
        r"rollout.quantization=fp8 requires GPUs .* this run uses CPUs",
    ),
    "no-file": (
        ("data.train_files=[nowhere.parquet]",),
        r"data\.train_files: nowhere\.parquet does not exist",
    ),
    "long-prompt": (
        ("data.max_prompt_length=3",),
        r"train\.parquet, row \d+: the prompt has \d+ tokens, but data\.max_prompt_length is 3",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_setting(tmp_path: Path, settings: list[str], case: str) -> None:
    words, expected = CASES[case]
    refused(tmp_path, [*settings, *words], expected)


def _without_reward_model(table: pa.Table, path: Path) -> None:
    pq.write_table(table.drop_columns(["reward_model"]), path)


def _with_text_for_a_struct(table: pa.Table, path: Path) -> None:
    position = table.schema.get_field_index("reward_model")
    pq.write_table(table.set_column(position, "reward_model", pa.array(["42"] * len(table))), path)


def _torn(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path)
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        pytest.param(
            _without_reward_model,
            r"bad\.parquet: column 'reward_model' is missing; the file has data_source, prompt",
            marks=pytest.mark.full,
        ),
        (
            _with_text_for_a_struct,
            r"bad\.parquet, row 0, column 'reward_model': expected a struct .* found '42'",
        ),
        pytest.param(_torn, r"bad\.parquet: not a readable parquet file", marks=pytest.mark.full),
    ],
)
def test_a_bad_parquet_file(
    tmp_path: Path, settings: list[str], write: Callable[[pa.Table, Path], None], expected: str
) -> None:
    data = next(word for word in settings if word.startswith("data.prepare.out=")).partition("=")[2]
    write(pq.ParquetFile(Path(data) / "train.parquet").read(), tmp_path / "bad.parquet")
    refused(tmp_path, [*settings, f"data.train_files=[{tmp_path / 'bad.parquet'}]"], expected)


def refused(tmp_path: Path, words: list[str], expected: str) -> None:
    """The run is refused before Ray starts, and what an earlier, unfinished run of this name left
    is as it was."""
    folder = tmp_path / "e2e"
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    before = {
        "checkpoints/latest.json": '{"folder": "global_step_1"}',
        "metrics.jsonl": '{"step": 1, "phase": "train", "x": 1}\n',
    }
    for name, text in before.items():
        (folder / name).write_text(text)
    driver = folder / "checkpoints" / "global_step_1" / "driver.json"
    write_sealed(driver, {"phase": "rl", "step": 1, "state": {"totals": {}, "sampler": {}}})
    policy = driver.parent / "policy"
    policy.mkdir()
    model = {"model_type": load_config("e2e").model.hf_config["model_type"]}
    created = "2026-01-01T00:00:00Z"
    Manifest(
        "rl", 1, ("model",), {"world": 1}, "float32", model, {}, created, backend="megatron"
    ).write(policy)
    before["checkpoints/global_step_1/driver.json"] = driver.read_text()
    with Run(tmp_path / "output", "train", *words, f"output_dir={tmp_path}") as run:
        message = message_of(run, 2)
        assert re.search(expected, message.replace("\n", " ")), message
        assert not any("raylet" in name for name in run.seen.values())
    assert {name: (folder / name).read_text() for name in before} == before


# ---- noticed while running
# --------------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_start(tmp_path: Path, settings: list[str]) -> None:
    words = [
        *settings,
        *ONE_PROCESS,
        "rollout.extra_args={no_such_argument: 1}",
        f"output_dir={tmp_path}",
    ]
    with Run(tmp_path / "output", "train", *words) as run:
        message = message_of(run, 1)
        assert any("raylet" in name for name in run.seen.values())
    assert message.startswith("hybridflow: engine engine-0: exited with status")
    assert "last lines of its log" in message and re.search(
        r"no.such.argument", message.partition("last lines of its log")[2]
    ), message


def test_engines_that_disagree_with_the_trainer(tmp_path: Path, settings: list[str]) -> None:
    words = [
        *settings,
        "cluster=in-process",
        "rollout.logprob_diff_bound=1e-12",
        f"output_dir={tmp_path}",
    ]
    with ForkedRun(tmp_path / "output", "train", *words) as run:
        message = message_of(run, 1)
    assert re.search(
        r"step 1: engines and trainer differ by \S+ in mean log-probability .*bound\s+1\.00e-12",
        message.replace("\n", " "),
    )
    # the warm start is not lost
    assert json.loads((tmp_path / "e2e" / "checkpoints" / "latest.json").read_text()) == {
        "folder": "global_step_0"
    }


PLACES = {
    "in-process": ("cluster=in-process",),
    "two-ranks": (
        "actor=tiny",
        "cluster.procs_per_node=2",
        "actor.parallel.expert=2",
        "rollout=tiny",
    ),
}
# Each command is a fork of a process that has loaded what all of them import.
FULL_DISK = """
import os, pathlib, subprocess, sys
import hybridflow.mcore.backend, hybridflow.trainer.app, transformers
from hybridflow.cli.main import main

checkpoints, report, room, *words = sys.argv[1:]


def mounted(*how):
    subprocess.run(["mount", *how, checkpoints], check=True)


def ended(steps):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        sys.exit(main([*words, f"sft.steps={steps}"]))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


mounted("-t", "tmpfs", "-o", "size=64m", "tmpfs")
codes = [ended(1)]
disk = os.statvfs(checkpoints)
used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
mounted("-o", f"remount,size={used * (100 + int(room)) // 100 // 1024}k")
codes.append(ended(3))
listing = "\\n".join(sorted(os.listdir(checkpoints)))
mounted("-o", "remount,size=64m")
codes.append(ended(3))
pathlib.Path(report, "listing").write_text(listing)
pathlib.Path(report, "codes").write_text(" ".join(map(str, codes)))
"""


@pytest.mark.parametrize(
    ("place", "room"),
    [
        ("in-process", 50),
        pytest.param("two-ranks", 50, marks=pytest.mark.full),
        pytest.param("two-ranks", 0, marks=pytest.mark.full),
    ],
)
def test_a_full_disk_leaves_the_last_checkpoint_loadable(
    tmp_path: Path, settings: list[str], place: str, room: int
) -> None:
    """Three times `hybridflow sft` with checkpoints on a small file system of their own: room for
    one, too little for two, room again."""
    checkpoints = tmp_path / "e2e" / "checkpoints"
    checkpoints.mkdir(parents=True)
    # a mount namespace of its own: the file system goes with the process, and no privilege is
    # needed where user namespaces are allowed
    namespace = [
        "unshare",
        "--mount",
        *([] if os.getuid() == 0 else ["--map-root-user"]),
        sys.executable,
        "-c",
        FULL_DISK,
        str(checkpoints),
        str(tmp_path),
        str(room),  # per cent of a checkpoint
    ]
    words = [
        "sft",
        *settings,
        *PLACES[place],
        f"output_dir={tmp_path}",
        "trainer.save_every_steps=1",
        "trainer.max_checkpoints_to_keep=1",
        "trainer.export=false",
    ]
    with Run(tmp_path / "output", *words, command=namespace) as run:
        run.end(600)
        assert run.left_behind() == []
        first, full, again = (tmp_path / "codes").read_text().split()
    assert (first, full, again) == ("0", "1", "0"), run.out + run.err
    assert run.err.count("hybridflow: ") == 1 and "Traceback" not in run.err, run.err
    assert re.search(
        r"checkpoint \S+sft_step_2\S* could not be written\b.*; the previous checkpoint is "
        r"untouched",
        run.err,
    ), run.err
    assert (tmp_path / "listing").read_text().split() == ["latest.json", "sft_step_1"]
    # by the run that met the full disk, and by the one after
    assert run.out.count(f"resuming from {checkpoints / 'sft_step_1'}") == 2
    records = [record["step"] for record in read_jsonl(tmp_path / "e2e" / "metrics.jsonl")]
    assert records == [1, 2, 3]
