"""The list of checks for one GPU: without a GPU nothing runs, and the first failure ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config.check import problems
from hybridflow.config.load import load_config
from hybridflow.config.schema import RunConfig
from hybridflow.device.platform import Platform
from hybridflow.models.check import problems as model_problems
from hybridflow.trainer.check_devices import check_devices
from tests import models
from tests.dist.harness.ranks import run_ranks
from tests.gpu import __main__ as gpu


def refuse(check: gpu.Check) -> tuple[int, float]:
    raise AssertionError(f"{check.name} was run")


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "checks.json"
    assert gpu.main([], lambda: Platform("cpu"), refuse, results) == gpu.NO_GPU
    assert "no GPU is visible to torch: nothing was run" in capsys.readouterr().out
    assert not results.exists()
    assert gpu.main(["--list"], lambda: Platform("cpu"), refuse, results) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [one.name for one in gpu.CHECKS]


def test_it_stops_at_the_first_failure_and_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, ran = tmp_path / "runs/checks.json", []

    def run(check: gpu.Check) -> tuple[int, float]:
        ran.append(check.name)
        return (124 if len(ran) == 2 else 0), 1.0

    names = [check.name for check in gpu.CHECKS]
    assert gpu.main([], lambda: Platform("cuda"), run, results) == 1
    assert ran == names[:2] and f"{names[1]} took more than 600 s" in capsys.readouterr().out
    assert [one["status"] for one in json.loads(results.read_text())] == [0, 124]
    assert gpu.main(["--from", names[1]], lambda: Platform("cuda"), run, results) == 0
    assert ran[2:] == names[1:]


@pytest.mark.slow
def test_what_the_checks_do_is_right_on_a_cpu(tmp_path: Path) -> None:
    """All but the device: the functions that the ranks run on a GPU."""
    arguments = {"hf": "TINY", "dtype": "bfloat16", "torch_modules": True, "folder": str(tmp_path / "saved")}
    (found,) = run_ranks(1, "tests.gpu.cases:resumed", **arguments)
    assert found["steps"] == [2, 3, 3] and found["off"] == 0 and found["norms"][0] == found["norms"][1] > 0
    (found,) = run_ranks(1, "tests.gpu.cases:slept", hf="TINY", count=3)
    assert found["same"] == [True] * 3 and len(found["away"]) == 3
    (found,) = run_ranks(1, "tests.gpu.cases:offloaded", hf="TINY")
    assert found["after"] == found["before"] and found["freed"] > 0
    arguments = {"hf": models.DENSE, "dtype": "float32", "tokens": 128, "product": 64, "rounds": 1}
    (found,) = run_ranks(1, "tests.gpu.train_step:measure", **arguments)
    assert min(found.values()) > 0
    assert found["share"] == pytest.approx(found["tflops"] / found["product_tflops"])


@pytest.mark.parametrize("check", [one for one in gpu.CHECKS if "train" in one.command])
def test_the_runs_of_the_list_are_accepted_on_a_gpu(check: gpu.Check) -> None:
    words = list(check.command[check.command.index("--config-name") + 2 :])
    config: RunConfig = load_config("tiny-moe-grpo", words)
    check_devices(config, "cuda")
    assert problems(config, files=False) == list(model_problems(config)) == []
    assert config.rollout.pool == "actor"
