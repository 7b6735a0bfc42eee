"""Faults of GPUs, as nvidia-smi, the kernel and DCGM report them: each is found, named and alone."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from hybridflow.launch.gpu_health import gpu_problems
from hybridflow.launch.preflight import Wanted, problems_here

# the elements of a healthy H100 that are read, in the form of `nvidia-smi -q -x` (driver 580)
GPU = """<gpu id="00000000:{bus}:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
<gpu_recovery_action>None</gpu_recovery_action>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen>
</pcie_gen><link_widths><max_link_width>16x</max_link_width>
<current_link_width>16x</current_link_width></link_widths></pci_gpu_link_info></pci>
<ecc_errors><volatile><sram_correctable>5</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_correctable>7</dram_correctable>
<dram_uncorrectable>0</dram_uncorrectable></volatile><aggregate>
<dram_uncorrectable>3</dram_uncorrectable><sram_threshold_exceeded>No</sram_threshold_exceeded>
</aggregate><channel_repair_pending>No</channel_repair_pending>
<tpc_repair_pending>No</tpc_repair_pending></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>
<remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows><clocks_event_reasons>
<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
<clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
</clocks_event_reasons><fabric><state>Completed</state><status>Success</status></fabric></gpu>"""
LINKS = """GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number})
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""
FAULTS = {
    "an uncorrectable error": (
        "<dram_uncorrectable>0</dram_uncorrectable>",
        "<dram_uncorrectable>2</dram_uncorrectable>",
        "2 uncorrectable ECC error(s) since the driver was loaded; drain",
    ),
    "remapping is pending": (
        "<remapped_row_pending>No",
        "<remapped_row_pending>Yes",
        "row remapping is pending; drain the node and reset the GPU",
    ),
    "remapping failed": (
        "<remapped_row_failure>No",
        "<remapped_row_failure>Yes",
        "row remapping failed; drain the node and have the GPU replaced",
    ),
    "too many SRAM errors": (
        "<sram_threshold_exceeded>No",
        "<sram_threshold_exceeded>Yes",
        "too many SRAM errors",
    ),
    "throttled by heat": (
        "hw_thermal_slowdown>Not Active",
        "hw_thermal_slowdown>Active",
        "it is throttled because of its temperature; check its cooling",
    ),
    "throttled by the power brake": (
        "power_brake_slowdown>Not Active",
        "power_brake_slowdown>Active",
        "it is throttled by the power brake",
    ),
    "fewer lanes": (
        "<current_link_width>16x",
        "<current_link_width>8x",
        "its PCIe link has 8 of 16 lanes; reseat it",
    ),
    "the driver wants a reset": (
        "<gpu_recovery_action>None",
        "<gpu_recovery_action>Drain P2P",
        "the driver asks for: Drain P2P",
    ),
    "no fabric": (
        "<state>Completed</state><status>Success</status>",
        "<state>In Progress</state><status>N/A</status>",
        "it has not joined the NVLink fabric (state In Progress, status N/A); start nvidia-fabric",
    ),
}


class Machine:
    """Programs in a folder that print what is written here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus = [GPU.format(bus=f"{number:02x}") for number in range(2)]
        self.links = "".join(LINKS.format(number=number) for number in range(2))
        self.kernel = ""
        self.dcgm = ""
        self.smi = "exit 0"

    def problems(self) -> list[str]:
        xml = f"<?xml version='1.0' ?><nvidia_smi_log>{''.join(self.gpus)}</nvidia_smi_log>"
        for name, text in (("xml", xml), ("links", self.links), ("kernel", self.kernel)):
            (self.folder / name).write_text(text)
        (self.folder / "dcgm").write_text(self.dcgm)
        here = self.folder
        for name, line in {
            "nvidia-smi": f'[ "$1" = -q ] && cat {here}/xml; [ "$1" = nvlink ] && cat {here}/links\n'
            f'[ "$1" = -q ] && {self.smi}; exit 0',
            "dmesg": f"cat {here}/kernel",
            "dcgmi": f"cat {here}/dcgm",
        }.items():
            (here / name).write_text(f"#!/bin/bash\n{line}\n")
            (here / name).chmod(0o755)
        return gpu_problems()


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
