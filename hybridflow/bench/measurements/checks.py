"""What `hybridflow doctor` says of the node, and what the nodes say of each other."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.bench.measurements.base import Place, measurement
from hybridflow.bench.result import Metric
from hybridflow.doctor import machine
from hybridflow.launch import preflight


@measurement("checks", "preflight", per_node=True)
def checks(place: Place) -> Iterator[Metric | dict[str, str]]:
    """devices, packages, limits and disks of a node as `hybridflow doctor` sees them, the way to the others, clocks"""
    for finding in machine.examine():
        if finding.level in ("warning", "error"):
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            yield {"name": finding.topic, "level": finding.level, "what": f"{finding.what}{remedy}"}
    if len(place.nodes) == 1:
        return
    wanted = preflight.Wanted(min_free_gib=1.0, min_shm_gib=0.1, min_open_files=1024)
    record = preflight.check_node(place.node, place.nodes, place.folder / "checks", wanted, place.timeout_s)
    for problem in record.problems:
        yield {"name": "node", "level": "error", "what": problem}
    for other, complaint in record.complaints.items():
        yield {"name": f"way to {other}", "level": "error", "what": complaint}
    if record.clocks:
        offset = max(record.clocks.values(), key=abs)
        yield Metric("checks", "clock/largest difference", "s", "none", (offset,))
