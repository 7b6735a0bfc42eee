"""Health checks of this node's GPUs, for faults that make a job fail or slow it down although every
GPU is visible. The sources are `nvidia-smi -q -x`, `nvidia-smi nvlink --status`, the kernel log,
and DCGM if its host engine is running. Fields that a GPU or driver does not report are skipped.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
from collections.abc import Iterator
from xml.etree import ElementTree

_TIMEOUT_S = 8.0  # timeout of each query; a prolog has 25 s in total
_XID_HOURS = 24
# Xid errors after which the GPU needs a reset, a reboot or a repair (docs.nvidia.com, Xid catalog)
_XIDS = {
    46: "stopped processing",
    48: "double-bit ECC error",
    62: "microcontroller halted",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained ECC error",
    119: "GSP does not respond",
    120: "GSP error",
    140: "unrecovered ECC error",
}
_UNCORRECTABLE = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "dram_uncorrectable",
    "double_bit/total",
)
_RESET = "drain the node and reset the GPU"
_REPLACE = "drain the node and have the GPU replaced"
# {path in the XML of a GPU: (value of a fault, fault, remedy)}
_FLAGS = {
    "ecc_errors/aggregate/sram_threshold_exceeded": ("Yes", "too many SRAM errors", _REPLACE),
    "ecc_errors/channel_repair_pending": ("Yes", "a channel repair is pending", _RESET),
    "ecc_errors/tpc_repair_pending": ("Yes", "a TPC repair is pending", _RESET),
    "remapped_rows/remapped_row_failure": ("Yes", "row remapping failed", _REPLACE),
    "remapped_rows/remapped_row_pending": ("Yes", "row remapping is pending", _RESET),
    "retired_pages/pending_retirement": ("Yes", "page retirement is pending", _RESET),
}
_SLOWDOWNS = {
    "hw_slowdown": "it is throttled by the hardware",
    "hw_thermal_slowdown": "it is throttled because of its temperature",
    "hw_power_brake_slowdown": "it is throttled by the power brake",
    "sw_thermal_slowdown": "it is throttled by the driver because of its temperature",
}
_COOL = "check its cooling and power supply"


def gpu_problems() -> list[str]:
    """Return one line for each fault, with its remedy; empty on a machine without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    text, trouble = _output("nvidia-smi", "-q", "-x")
    found = [f"nvidia-smi: {trouble}"] if trouble else [*_xml_problems(text)]
    found += _link_problems(_output("nvidia-smi", "nvlink", "--status")[0])
    found += _xid_problems(_output("dmesg", "--time-format", "iso")[0])
    found += _dcgm_problems(_output("dcgmi", "health", "--check")[0])
    return found


def _xml_problems(text: str) -> Iterator[str]:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        yield f"nvidia-smi -q -x returned no XML ({error}); reload the driver"
        return
    for number, gpu in enumerate(root.findall("gpu")):
        where = f"GPU {number} ({gpu.get('id', 'unknown address')})"
        for what, remedy in _faults(gpu):
            yield f"{where}: {what}; {remedy}"


def _faults(gpu: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Yield (fault, remedy) for each fault of a GPU."""
    errors = sum(_number(gpu, f"ecc_errors/volatile/{name}") for name in _UNCORRECTABLE)
    if errors:
        yield f"{errors} uncorrectable ECC error(s) since the driver was loaded", _RESET
    for path, (value, what, remedy) in _FLAGS.items():
        if gpu.findtext(path, "").strip() == value:
            yield what, remedy
    for section in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for name, what in _SLOWDOWNS.items():
            path = f"{section}/{section[:-1]}_{name}"
            if gpu.findtext(path, "").strip() == "Active":
                yield what, _COOL
    widths = "pci/pci_gpu_link_info/link_widths"
    now, most = (
        _number(gpu, f"{widths}/{name}") for name in ("current_link_width", "max_link_width")
    )
    if 0 < now < most:
        yield f"its PCIe link uses {now} of {most} lanes", "reseat it"
    action = gpu.findtext("gpu_recovery_action", "None").strip()
    if action not in ("None", "N/A", ""):
        yield f"the driver requests this action: {action}", _RESET
    state = gpu.findtext("fabric/state", "N/A").strip()
    status = gpu.findtext("fabric/status", "N/A").strip()
    if state not in ("N/A", "Completed") or status not in ("N/A", "Success"):
        what = f"it has not joined the NVLink fabric (state {state}, status {status})"
        yield what, "start nvidia-fabricmanager on that node"


def _number(gpu: ElementTree.Element, path: str) -> int:
    """Parse a count such as `3` or `16x`; 0 if the GPU does not report it."""
    match = re.match(r"\s*(\d+)", gpu.findtext(path, ""))
    return int(match[1]) if match else 0


def _link_problems(text: str) -> Iterator[str]:
    """Find inactive NVLinks of GPUs on which other NVLinks are active."""
    for part in re.split(r"(?m)^(?=GPU \d+)", text):
        match = re.match(r"GPU (\d+)", part)
        links = re.findall(r"(?m)^\s*Link (\d+):\s*(.*)$", part)
        down = [link for link, said in links if "inactive" in said.lower()]
        if match and down and len(down) < len(links):
            yield (
                f"GPU {match[1]}: {len(down)} of {len(links)} NVLinks are inactive (link "
                f"{', '.join(down)}); drain the node and reset its GPUs"
            )


def _xid_problems(text: str) -> Iterator[str]:
    """Find recent Xid errors from which a GPU does not recover by itself. On some systems, only
    root (as in a prolog) can read the kernel log.
    """
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=_XID_HOURS)
    seen: set[tuple[str, int]] = set()
    for line in text.splitlines():
        match = re.match(r"(\S+) .*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),", line)
        if match is None or (number := int(match[3])) not in _XIDS:
            continue
        try:
            at = datetime.datetime.fromisoformat(match[1].replace(",", "."))
        except ValueError:
            continue
        if at.tzinfo is not None and at >= since and (match[2], number) not in seen:
            seen.add((match[2], number))
            yield (
                f"GPU {match[2]}: Xid {number} ({_XIDS[number]}) in the last {_XID_HOURS} hours; "
                f"{_RESET}"
            )


def _dcgm_problems(text: str) -> Iterator[str]:
    """Return the problem reported by DCGM's background health watches, if any."""
    match = re.search(r"Overall Health\s*\|\s*(\w+)", text)
    if match and match[1] not in ("Healthy", "Pass"):
        yield f"DCGM: overall health is {match[1]}; see `dcgmi health --check`"


def _output(*command: str) -> tuple[str, str]:
    """Return a command's output, and an error message if it failed. Both are empty if the command
    is not installed.
    """
    if shutil.which(command[0]) is None:
        return "", ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        said = " ".join(f"{done.stdout} {done.stderr}".split())
        return "", said[:200] or f"exited with status {done.returncode}"
    return done.stdout, ""
