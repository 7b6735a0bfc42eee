"""Faults of GPUs, as nvidia-smi, the kernel and DCGM report them: each is found, named and alone."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

import pytest

from hybridflow.launch.preflight import Wanted, problems_here
from tests.unit.launch.gpus import FAULTS, GPU, Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Machine(tmp_path)


def test_a_healthy_machine_has_none(machine: Machine) -> None:
    assert machine.problems() == []
    # other generations lack the fabric, ECC or the newer names
    machine.gpus = ["<gpu id='0'></gpu>", GPU.replace("Completed", "N/A").replace("Success", "N/A")]
    machine.links = "GPU 0: A (UUID: GPU-0)\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n"
    assert machine.problems() == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_on_its_gpu_and_alone(machine: Machine, name: str) -> None:
    before, after, what = FAULTS[name]
    assert before in machine.gpus[1]
    machine.gpus[1] = machine.gpus[1].replace(before, after)
    [line] = machine.problems()
    assert line.startswith("GPU 1 (00000000:01:00.0): ") and what in line
    # under the older names too
    machine.gpus[1] = machine.gpus[1].replace("clocks_event_reason", "clocks_throttle_reason")
    assert machine.problems() == [line]


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "no fabric"])  # it has none
def test_each_fault_is_found_in_what_an_h100_prints(machine: Machine, name: str) -> None:
    real = (Path(__file__).parent / "h100.xml").read_text(encoding="utf-8")
    (gpu,) = re.findall("<gpu .*</gpu>", real, re.DOTALL)
    machine.gpus = [gpu]
    machine.links = ""
    assert machine.problems() == []
    before, after, what = FAULTS[name]
    assert before in gpu
    machine.gpus = [gpu.replace(before, after, 1)]
    [line] = machine.problems()
    assert line.startswith("GPU 0 (00000000:00:06.0): ") and what in line


def test_links_of_a_gpu_that_are_down(machine: Machine) -> None:
    machine.links = machine.links[::-1].replace("26.562 GB/s"[::-1], "<inactive>"[::-1], 1)[::-1]
    [line] = machine.problems()
    assert line.startswith("GPU 1: 1 of 2 NVLinks are inactive (link 1); drain")


def test_recent_xids_that_need_a_reset_are_named_once(machine: Machine) -> None:
    now = datetime.datetime.now(datetime.UTC)
    for hours, number in ((30, 79), (2, 13), (3, 48), (1, 48)):
        at = (now - datetime.timedelta(hours=hours)).isoformat().replace(".", ",")
        machine.kernel += f"{at} NVRM: Xid (PCI:0000:01:00): {number}, pid=7, name=python\n"
    machine.kernel += "yesterday NVRM: Xid (PCI:0000:01:00): 79, no time\nother lines\n"
    [line] = machine.problems()
    assert line.startswith("GPU 0000:01:00: Xid 48 (double-bit ECC error) in the last 24 hours")


def test_the_verdict_of_dcgm(machine: Machine) -> None:
    table = "| Overall Health            | {}                              |\n"
    machine.dcgm = table.format("Healthy")
    assert machine.problems() == []
    machine.dcgm = table.format("Failure")
    assert machine.problems() == ["DCGM: overall health is Failure; see `dcgmi health --check`"]


@pytest.mark.parametrize(("smi", "what"), [("exit 9", "nvidia-smi: "), ("echo '<'", "no XML")])
def test_a_driver_that_fails_is_a_problem_too(machine: Machine, smi: str, what: str) -> None:
    machine.smi = smi
    [line] = machine.problems()
    assert what in line


def test_preflight_and_prolog_see_them(machine: Machine, tmp_path: Path) -> None:
    before, after, what = FAULTS["throttled by heat"]
    machine.gpus[0] = machine.gpus[0].replace(before, after)
    machine.problems()
    wanted = Wanted(min_free_gib=0.0, min_shm_gib=0.0)
    assert [what in line for line in problems_here(tmp_path, wanted)] == [True]
