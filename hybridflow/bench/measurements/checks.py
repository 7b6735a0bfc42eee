"""Runs the checks of `hybridflow doctor` on each node, and checks between nodes."""

from __future__ import annotations

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.result import measured
from hybridflow.doctor import machine
from hybridflow.launch import preflight


@measurement("checks", "preflight", per_node=True)
def checks(place: Place) -> Yields:
    """the checks of `hybridflow doctor` (devices, packages, limits, disks), connections to other
    nodes, and clocks"""
    for finding in machine.examine():
        if finding.level in ("warning", "error"):
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            what = f"{finding.what}{remedy}"
            yield {"name": finding.topic, "level": finding.level, "what": what}
    if len(place.nodes) == 1:
        return
    wanted = preflight.Wanted(min_free_gib=1.0, min_shm_gib=0.1, min_open_files=1024)
    record = preflight.check_node(
        place.node, place.nodes, place.folder / "checks", wanted, place.timeout_s
    )
    for problem in record.problems:
        yield {"name": "node", "level": "error", "what": problem}
    for other, complaint in record.complaints.items():
        yield {"name": f"connection to {other}", "level": "error", "what": complaint}
    if record.clocks:
        yield measured(
            "clock/largest difference", "s", max(record.clocks.values(), key=abs)
        )
