"""The doctor's findings: levels, remedies, exit status, and its three forms of output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.cli.main import main
from hybridflow.config.load import load_config
from hybridflow.doctor import machine
from hybridflow.doctor.findings import Finding, exit_code, table
from hybridflow.doctor.machine import examine
from hybridflow.errors import ResourceError
from hybridflow.launch.preflight import Wanted, check_node
from tests.published.folders import published_folder


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    """The last finding of each topic."""
    return {finding.topic: finding for finding in findings}


def test_on_this_machine_a_recipe_can_run_and_every_trouble_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "query_gpus", lambda: ([], ""))
    found = examine(load_config("e2e"))
    assert [one for one in found if one.level == "error"] == [] and exit_code(found) == 0
    assert [one for one in found if one.level == "warning" and not one.remedy] == []
    topics = by_topic(found)
    assert topics["gpu"].level == "unused" and "CPUs and gloo" in topics["gpu"].what
    assert topics["transformer-engine"].level == "unused" and topics["ray"].level == "ok"


def test_gpus_without_cuda_and_too_few_for_the_recipe_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "query_gpus", lambda: (["H200, 141 GiB, 580.1"] * 2, ""))
    monkeypatch.setattr(machine, "_torch_cuda", lambda: None)
    topics = by_topic(examine(load_config("e2e")))
    assert (
        topics["torch.cuda"].remedy == "run make setup LANE=gpu"
        and topics["torch.cuda"].level == "error"
    )
    assert "needs 4 ranks per node, but this node has 2 GPUs" in topics["recipe"].what
    assert topics["apex"].level == "warning" and topics["apex"].remedy


def test_a_driver_that_does_not_answer_is_named_by_doctor_and_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/bash\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = by_topic(examine())["gpu"]
    assert (
        found.level == "error"
        and "Driver/library version mismatch" in found.what
        and "driver" in found.remedy
    )
    record = check_node(
        "n1",
        ["n1"],
        tmp_path,
        Wanted(gpus=8, min_free_gib=0.0, min_shm_gib=0.0, min_open_files=1),
        5.0,
    )
    assert (
        "0 of 8 GPUs are visible (nvidia-smi: Failed to initialize NVML: Driver/library"
        in record.problems[0]
    )


def test_a_missing_package_ephemeral_ports_and_a_silent_slurm_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "ray" else "1")
    monkeypatch.setattr(machine, "FIRST_PORT", 60000)
    monkeypatch.setattr(
        machine.shutil, "which", lambda name: "/usr/bin/sinfo" if name == "sinfo" else None
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    answer = SimpleNamespace(returncode=1, stdout="", stderr="a\nslurmctld is down")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: answer)
    monkeypatch.setitem(sys.modules, "hybridflow_kernels", None)
    topics = by_topic(examine())
    assert "kernels/" in topics["kernels"].remedy
    assert (
        topics["ray"].level
        == topics["kernels"].level
        == topics["ports"].level
        == topics["slurm"].level
        == "error"
    )
    assert topics["slurm"].what == "slurmctld is down" and "sysctl" in topics["ports"].remedy
    assert exit_code(list(topics.values())) == 1


@pytest.mark.parametrize(
    ("version", "level"), [((3, 11, 7), "ok"), ((3, 12, 1), "ok"), ((3, 13, 0), "warning")]
)
def test_the_python_of_each_lane_is_right(
    version: tuple[int, int, int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.sys, "version_info", version)
    assert next(machine._versions()).level == level


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object) -> None:
        raise ResourceError("0 of 1 nodes have joined Ray at 10.0.0.1:1")

    monkeypatch.setattr("hybridflow.single_controller.cluster.wait_for_nodes", refuse)
    found = by_topic(examine(load_config("e2e", ["cluster.address='10.0.0.1:1'"])))["ray cluster"]
    assert (
        found.level == "error"
        and "0 of 1 nodes" in found.what
        and "RAY_AUTH_TOKEN_PATH" in found.remedy
    )


def test_the_command_prints_a_table_or_json_and_refuses_a_wrong_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--recipe", "e2e"]) == 0
    assert "e2e: 4 ranks on 1 node(s)" in capsys.readouterr().out
    assert main(["doctor", "--recipe", "e2e", "actor.optim.lrr=1", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0]["level"] == "error" and "actor.optim.lr" in findings[0]["what"]
    assert main(["doctor", "--nodes"]) == 1 and "under salloc or sbatch" in capsys.readouterr().err


def test_the_table_counts_and_shows_remedies_below() -> None:
    text = table([Finding("a", "ok", "x"), Finding("bb", "error", "y", "do z")])
    assert text.splitlines() == [
        "ok      a   x",
        "error   bb  y",
        "            -> do z",
        "1 error(s), 0 warning(s)",
    ]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "--config-name", "e2e"], "login node of a Slurm cluster"),
        (
            ["render", "--config-name", "e2e", "cluster.address=1.2.3.4:6379"],
            "starts its own Ray cluster; remove the key",
        ),
        (["render", "--config-name", "e2e", "trainer.resume=disable"], "trainer.resume=disable"),
        (["render", "--config-name", "e2e", "--site", "none.yaml"], "could not read"),
        (["render", "--config-name", "e2e", "actr.x=1"], "unknown key actr"),
        (["logs", "7"], "pass the job ID"),
        (["status", "7"], "login node of a Slurm cluster"),
    ],
)
def test_a_wrong_slurm_command_is_one_message(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", *words]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_flow_is_checked_before_its_job_waits_in_the_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = tmp_path / "own.py"
    flow.write_text(
        "from hybridflow.flows.base import flow\n\n\n"
        "@flow('own', roles=('policy',))\nasync def own(run):\n    async for step in run.steps():\n"
        "        batch = await run.samples()\n        batch = run.advantages(batch)\n"
        "        await run.policy.update(batch)\n"
    )
    words = ["slurm", "render", "--config-name", "e2e", f"algorithm.flow={flow}:own"]
    assert main(words) == 2
    assert "does not call run.reference" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_folder_without_weights_is_refused_before_its_job_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = published_folder("qwen3", tmp_path / "whole") / "config.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(config, empty)
    words = ["slurm", "render", "--config-name", "e2e", f"model.path={empty}"]
    assert main([*words, "~model.hf_config", "actor.parallel.expert=1"]) == 2
    assert "contains neither model.safetensors nor" in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere")
def test_each_task_of_an_array_has_its_own_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "slurm",
                "render",
                "--config-name",
                "e2e",
                "--array",
                "1-3",
                "name=sweep-%a",
                "seed=%a",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "#SBATCH --array=1-3" in shown and "/runs/sweep-%a" in shown
    assert "TRAIN=(train --config-name e2e name=sweep-%a seed=%a)" in shown
