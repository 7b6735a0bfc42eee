"""`make gpu`: nothing runs without a GPU, no check ends another, what it finds is written,
and a CPU can rehearse it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.check import problems
from hybridflow.config.load import load_config
from hybridflow.config.schema import RunConfig
from hybridflow.models.check import problems as model_problems
from hybridflow.trainer.check_devices import check_devices
from tests import models
from tests.dist.harness.ranks import run_ranks
from tests.gpu import __main__ as gpu
from tests.gpu import install
from tests.gpu.checks import CHECKS, Check

ROOT = Path(__file__).parents[2]


def check(name: str, code: str, **more: Any) -> Check:
    given = {"limit_s": 20.0, "predicted_s": 1.0} | more
    return Check(name, 1, name, ("-c", code), rehearsal=("-c", code), **given)


def found(out: Path, checks: Sequence[Check], *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the records by name."""
    status = gpu.main(["--rehearse", "--out", str(out), *words], checks)
    return status, {
        one["check"]: one for one in json.loads((out / "part1.json").read_text())["checks"]
    }


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--out", str(tmp_path / "out")]) == gpu.NO_GPU
    assert "nothing was measured" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert gpu.main(["--list", "--part", "2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        c.name for c in CHECKS if c.part == 2
    ]


def test_a_check_that_fails_hangs_or_lacks_a_package_ends_nothing_but_itself(
    tmp_path: Path,
) -> None:
    checks = [
        check("fails", "print('before'); raise SystemExit(3)"),
        check("hangs", "import time; time.sleep(60)", limit_s=0.5),
        check("lacks", "", needs=("no_such_package",)),
        check("killed", "import os; os.kill(os.getpid(), 9)"),
        check("works", "print('RESULT {\"figure\": 2.0}')", predicted={"figure": (1.0, 3.0)}),
    ]
    status, records = found(tmp_path, checks)
    assert status == 1
    assert {name: one["status"] for name, one in records.items()} == {
        "fails": "failed",
        "hangs": "failed",
        "lacks": "not run",
        "killed": "failed",
        "works": "passed",
    }
    assert records["fails"]["why"].startswith("ended with status 3: before")
    assert (
        "took more than" in records["hangs"]["why"]
        and records["lacks"]["why"] == "no_such_package is not installed"
    )
    assert records["works"]["figures"] == {"figure": 2.0} and records["works"]["predicted"] == {
        "figure": [1.0, 3.0]
    }
    assert "===== fails\nbefore" in (tmp_path / "logs.txt").read_text()


def test_figures_out_of_their_bounds_fail_and_missed_predictions_are_named() -> None:
    bounds = {"a": (0.0, 1.0), "b": (2.0, gpu.CHECKS[0].passes["copy_TB_s"][1])}
    assert gpu._outside({"a": 0.5, "b": 9.0}, bounds) == {}
    assert gpu._outside({"a": 1.1, "b": 9.0}, bounds) == {"a": (0.0, 1.0)}
    assert gpu._outside({"a": 1.1, "b": 1.7}, bounds, 0.2) == {}
    assert gpu._outside({"a": float("nan")}, bounds).keys() == {"a", "b"}


def test_time_that_is_used_up_leaves_the_rest_out(tmp_path: Path) -> None:
    checks = [check("slow", "import time; time.sleep(60)"), check("next", "")]
    status, records = found(tmp_path, checks, "--budget", "1")
    assert status == 1 and "took more than 1 s" in records["slow"]["why"]
    assert records["next"]["status"] == "failed" and records["next"]["seconds"] < 1


def test_a_folder_that_cannot_be_written_costs_the_files_and_not_the_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [check("works", "print('RESULT {\"figure\": 7}')")]
    assert gpu.main(["--rehearse", "--out", "/dev/full/out"], checks) == 0
    printed = capsys.readouterr().out
    assert "part1.json could not be written: [Errno 20] Not a directory" in printed
    assert "logs.txt could not be written" in printed and '"figure": 7' in printed


def test_the_output_of_the_first_check_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "none/yet"
    assert gpu.main(["--rehearse", "--out", str(out)], [check("works", "print('here')")]) == 0
    assert (out / "logs.txt").read_text() == "\n===== works\nhere\n"


def wheel(folder: Path, name: str, tag: str) -> Path:
    file = folder / f"{name}-1.0-{tag}.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "value = 1\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.mark.slow
def test_a_wheel_of_another_python_is_a_line_of_its_own_and_the_rest_is_installed(
    tmp_path: Path,
) -> None:
    piece = tmp_path / "wheels/a"
    piece.mkdir(parents=True)
    wheel(piece, "brought", "py3-none-any")
    wheel(piece, "foreign", "cp39-cp39-manylinux_2_28_x86_64")
    whole = wheel(piece, "joined", "py3-none-any")
    parts = [tmp_path / f"wheels/te{number}" for number in (1, 2)]
    for number, part in enumerate(parts):
        part.mkdir()
        (part / f"{whole.name}.part{number}").write_bytes(
            whole.read_bytes()[:200] if not number else whole.read_bytes()[200:]
        )
    whole.unlink()
    wheel(piece, "numpy", "py3-none-any")  # the machine has one
    site = tmp_path / "site"
    records = install.install(site, tmp_path / "wheels")
    assert [one["status"] for one in records] == ["passed", "failed"]
    assert records[0]["figures"] == {"wheels": 2}
    assert (
        records[1]["check"].startswith("install foreign")
        and "not a supported wheel" in records[1]["why"]
    )
    assert sorted(file.name for file in site.glob("*.py")) == ["brought.py", "joined.py"]


def test_the_checks_of_part_one_fit_into_their_time() -> None:
    assert sum(one.predicted_s for one in CHECKS if one.part == 1) <= 0.8 * gpu.BUDGET_S
    assert len({one.name for one in CHECKS}) == len(CHECKS)


def rehearse(out: Path, *words: str) -> dict[str, Any]:
    """As its user starts it, in a process of its own; the records by name."""
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--out", str(out), *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    written = json.loads((out / "part1.json").read_text())
    assert done.returncode == 0, [one for one in written["checks"] if one["status"] == "failed"]
    assert written["rehearsal"] and written["measured"] == "nothing: no GPU"
    return {one["check"]: one for one in written["checks"]}


@pytest.mark.slow
@pytest.mark.full
def test_a_cpu_rehearses_what_measures(tmp_path: Path) -> None:
    records = rehearse(tmp_path, "--only", "environment", "kernels", "speed", "update")
    assert {one["status"] for one in records.values()} == {"passed"} and len(records) == 4
    assert records["kernels"]["figures"]["wrong"] == 0
    assert records["update"]["figures"].keys() >= {"share", "seconds", "waits", "peak_memory_GB"}
    assert records["speed"]["figures"].keys() >= {"checksum_share", "pack_share", "scatter_share"}


@pytest.mark.slow
@pytest.mark.full
def test_a_cpu_rehearses_all_of_part_one(tmp_path: Path) -> None:
    records = rehearse(tmp_path)
    assert {name for name, one in records.items() if one["status"] != "passed"} == {
        "cuda-ipc",
        "ipc-speed",
    }
    assert records["tiny-grpo"]["figures"]["logprob_diff_mean"] < 0.03


@pytest.mark.slow
def test_what_the_checks_do_is_right_on_a_cpu(tmp_path: Path) -> None:
    """All but the device: the functions that the ranks run on a GPU."""
    arguments = {
        "hf": "TINY",
        "dtype": "bfloat16",
        "torch_modules": True,
        "folder": str(tmp_path / "saved"),
    }
    (found,) = run_ranks(1, "tests.gpu.cases:resumed", **arguments)
    assert (
        found["steps"] == [2, 3, 3]
        and found["off"] == 0
        and found["norms"][0] == found["norms"][1] > 0
    )
    (found,) = run_ranks(1, "tests.gpu.cases:slept", hf="TINY", count=3)
    assert found["same"] == [True] * 3 and len(found["away"]) == 3
    (found,) = run_ranks(1, "tests.gpu.cases:offloaded", hf="TINY")
    assert found["after"] == found["before"] and found["freed"] > 0
    arguments = {"hf": models.DENSE, "dtype": "float32", "tokens": 128, "product": 64, "rounds": 1}
    (found,) = run_ranks(1, "tests.gpu.train_step:measure", **arguments)
    assert min(found.values()) > 0
    assert found["share"] == pytest.approx(found["TFLOP_s"] / found["product_TFLOP_s"])


@pytest.mark.slow
@pytest.mark.parametrize("one", [one for one in CHECKS if one.run], ids=lambda one: one.name)
def test_the_runs_of_the_list_are_accepted_on_a_gpu(one: Check) -> None:
    words = list(one.command[one.command.index("--config-name") + 2 :])
    config: RunConfig = load_config("tiny-moe-grpo", words)
    check_devices(config, "cuda")
    assert problems(config, files=False) == list(model_problems(config)) == []
    assert one.part == 1 or config.rollout.pool == "actor"
    assert config.name == one.run


def test_a_check_without_a_rehearsal_is_not_run_on_a_cpu(tmp_path: Path) -> None:
    status, records = found(
        tmp_path, [replace(check("gpu alone", "raise SystemExit(1)"), rehearsal=None)]
    )
    assert status == 0 and records["gpu alone"]["why"] == "needs a GPU"
