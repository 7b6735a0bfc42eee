"""A machine with GPUs, as nvidia-smi, the kernel and DCGM describe it: programs that print text."""

from __future__ import annotations

from pathlib import Path

from hybridflow.launch.gpu_health import gpu_problems

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
        "its PCIe link uses 8 of 16 lanes; reseat it",
    ),
    "the driver wants a reset": (
        "<gpu_recovery_action>None",
        "<gpu_recovery_action>Drain P2P",
        "the driver requests this action: Drain P2P",
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
