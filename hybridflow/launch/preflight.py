"""Checks of a job's nodes before Ray starts: resources, the shared folder, clocks, and the
connections between all nodes.

One process per node runs `check_node`, all concurrently; `choose` evaluates their records.
"""

from __future__ import annotations

import json
import math
import os
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hybridflow.errors import ResourceError
from hybridflow.launch import records
from hybridflow.launch.gpu_health import gpu_problems
from hybridflow.observe.environment import query_gpus

MARK = "preflight "  # starts the line with a node's record, among other output of srun
_GIB = 2**30
_POLL_S = 0.1
_CONNECT_S = 10.0


@dataclass(frozen=True)
class Wanted:
    """Requirements for a node. If `gpus` is 0, only the health of the node's GPUs is checked, not
    their number.
    """

    gpus: int = 0
    min_free_gib: float = 5.0
    min_shm_gib: float = 1.0
    min_open_files: int = 4096
    interface: str | None = None


@dataclass
class Record:
    """The results of one node's checks of itself and of the other nodes."""

    node: str
    address: str = ""
    port: int = 0
    nonce: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # other node -> the problem with it
    complaints: dict[str, str] = field(default_factory=dict)
    # other node -> minimum number of seconds by which its clock is ahead
    clocks: dict[str, float] = field(default_factory=dict)


def check_node(
    node: str,
    hosts: Sequence[str],
    folder: Path,
    wanted: Wanted,
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> Record:
    """Check this node and its connections to the others. Problems are recorded, not raised.

    Args:
        node: this node's name in `hosts`.
        hosts: all nodes of the allocation.
        folder: the folder for this attempt to run the job; every node must see the files that the
            others write there.
        wanted: requirements for the node.
        timeout_s: seconds to wait for the others' files.
        clock: seconds since the epoch; replaced in tests.
    """
    record = Record(node, nonce=secrets.token_hex(8))
    deadline = time.monotonic() + timeout_s
    # a network filesystem may show it with a delay
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not folder.is_dir():
        record.problems.append(
            f"{folder} does not exist on that node; choose an output_dir that all nodes mount"
        )
        return record
    record.facts, record.problems = _resources(folder, wanted)
    meeting = folder / "preflight"
    try:
        record.address = node_address(node, wanted.interface)
        server = socket.create_server((record.address, 0), backlog=1024)
    except (OSError, ResourceError) as error:
        record.problems.append(
            f"{error}; check the site file's `interface` and the node's addresses"
        )
        return record
    record.port = server.getsockname()[1]
    answering = threading.Thread(target=_answer, args=(server, record, clock), daemon=True)
    answering.start()
    others = [host for host in hosts if host != node]
    try:
        records.write(
            meeting / f"{node}.json",
            {"address": record.address, "port": record.port, "nonce": record.nonce},
        )
    except OSError as error:
        record.problems.append(
            f"could not write to {folder} ({error}); choose an output_dir on a shared filesystem"
        )
        return record
    for other, found in _await((meeting / f"{other}.json" for other in others), deadline):
        if found is None:
            record.complaints[other] = (
                f"its file did not appear in {folder} within {timeout_s:.0f} s; the node is down, "
                "or the folder is not on a filesystem that both share: choose an output_dir that "
                "all nodes mount"
            )
        else:
            _visit(record, other, found, clock)
    records.write(meeting / f"{node}.done", {})
    seen = [other for other in others if other in record.clocks]
    # they may still be connecting to this node
    list(_await((meeting / f"{other}.done" for other in seen), deadline))
    server.close()
    return record


def node_address(node: str, interface: str | None) -> str:
    """Return the IPv4 address at which other nodes reach this one: the address of `interface` or,
    by default, the node's address in Slurm.

    Raises:
        ResourceError: the interface does not exist or has no IPv4 address, or the node's name
            cannot be resolved.
    """
    if interface is not None:
        addresses = psutil.net_if_addrs()
        found = []
        for entry in addresses.get(interface, []):
            if entry.family == socket.AF_INET:
                found.append(entry.address)
        if not found:
            raise ResourceError(
                f"interface {interface} has no IPv4 address; available: "
                f"{', '.join(sorted(addresses))}"
            )
        return found[0]
    name = node
    if shutil.which("scontrol"):
        asked = subprocess.run(
            ["scontrol", "show", "node", node, "--oneliner"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        words = []
        for word in asked.stdout.split():
            if word.startswith("NodeAddr="):
                words.append(word.removeprefix("NodeAddr="))
        name = words[0] if words else node
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]  # type: ignore[return-value]
    except OSError as error:
        raise ResourceError(f"the name {name} has no IPv4 address ({error})") from error


def parse(output: str) -> dict[str, Record]:
    """Parse the records in the output of all nodes, keyed by node. Other output is ignored."""
    found = {}
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        try:
            record = Record(**json.loads(text)) if mark else None
        except (ValueError, TypeError):
            continue
        if record is not None:
            found[record.node] = record
    return found


def print_record(record: Record) -> None:
    """Print the record as one line, which srun forwards regardless of the filesystem."""
    print(MARK + json.dumps(asdict(record)), flush=True)


def usable(
    hosts: Sequence[str], found: Mapping[str, Record], max_clock_skew_s: float, errors: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return the usable nodes in the allocation's order, and the problem with each excluded node.
    `errors` is srun's error output.
    """
    bad = {
        host: (
            f"it did not answer{_said(host, errors)}; check its state with `sinfo -R`, or exclude "
            "it (--exclude)"
        )
        for host in hosts
        if host not in found
    }
    bad |= {record.node: "; ".join(record.problems) for record in found.values() if record.problems}
    good = [host for host in hosts if host not in bad]
    while pairs := _complaints(good, found, max_clock_skew_s):
        counts: Counter[str] = Counter()
        for accuser, accused, _ in pairs:
            counts.update({accuser, accused})
        worst = max(good, key=lambda host: (counts[host], good.index(host)))
        accuser, _, why = next(pair for pair in pairs if worst in pair[:2])
        other = next(host for host in (accuser, *pairs[0][:2]) if host != worst)
        bad[worst] = f"problem with {other}: {why}"
        good.remove(worst)
    return good, bad


def choose(
    hosts: Sequence[str],
    found: Mapping[str, Record],
    nodes: int,
    max_clock_skew_s: float,
    errors: str = "",
) -> list[Record]:
    """Return the first `nodes` usable nodes, in the allocation's order.

    Raises:
        ResourceError: fewer nodes are usable. The message lists each bad node, its problem and the
            remedy.
    """
    good, bad = usable(hosts, found, max_clock_skew_s, errors)
    if len(good) < nodes:
        described = "\n".join(f"  {host}: {why}" for host, why in bad.items())
        raise ResourceError(
            f"preflight: {len(good)} of {len(hosts)} nodes are usable, but the job requires "
            f"{nodes}\n{described}"
        )
    return [found[host] for host in good[:nodes]]


def _complaints(
    good: Sequence[str], found: Mapping[str, Record], max_clock_skew_s: float
) -> list[tuple[str, str, str]]:
    """Return (reporting node, affected node, problem) for each problem that a usable node reported
    about another node.
    """
    pairs = []
    for host in good:
        record = found[host]
        for other in good:
            if other in record.complaints:
                pairs.append((host, other, record.complaints[other]))
            elif abs(offset := record.clocks.get(other, 0.0)) > max_clock_skew_s:
                pairs.append(
                    (
                        host,
                        other,
                        (
                            f"the clock of {other} is {offset:+.1f} s off {host}'s; start chrony "
                            "or ntpd there"
                        ),
                    )
                )
    return pairs


def _said(host: str, errors: str) -> str:
    said = [line for line in errors.splitlines() if line.startswith("srun: error:")]
    lines = [line for line in said if host in line] or said
    return f" ({lines[-1].strip()})" if lines else ""


def problems_here(folder: Path, wanted: Wanted) -> list[str]:
    """Return this node's problems, including errors when writing and syncing a file in `folder`."""
    _, problems = _resources(folder, wanted)
    probe = folder / f".hybridflow-{os.getpid()}"
    try:
        with probe.open("wb") as stream:
            stream.write(b"x" * 4096)
            os.fsync(stream.fileno())
    except OSError as error:
        problems.append(f"could not write to {folder} ({error})")
    finally:
        probe.unlink(missing_ok=True)
    return problems


def _resources(folder: Path, wanted: Wanted) -> tuple[dict[str, Any], list[str]]:
    """Return facts about this machine, and the requirements that it does not meet."""
    temporary = Path(tempfile.gettempdir())
    free = {str(path): _free_gib(path) for path in (temporary, folder)}
    shm = _free_gib(Path("/dev/shm"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    gpus, trouble = query_gpus()
    problems = []
    for path, gib in free.items():
        if gib < wanted.min_free_gib:
            problems.append(
                f"{path} has {gib:.1f} GiB free, but {wanted.min_free_gib:g} are required; free "
                "space there, or lower limits.min_free_gib"
            )
    if shm < wanted.min_shm_gib:
        problems.append(
            f"/dev/shm has {shm:.1f} GiB free, but {wanted.min_shm_gib:g} are required; remove "
            "leftover files"
        )
    if files != resource.RLIM_INFINITY and files < wanted.min_open_files:
        problems.append(
            f"the limit on open files is {files}, but {wanted.min_open_files} are required; raise "
            "slurmd's LimitNOFILE"
        )
    if len(gpus) < wanted.gpus:
        problems.append(
            f"{len(gpus)} of {wanted.gpus} GPUs are visible{f' ({trouble})' if trouble else ''}; "
            "check nvidia-smi and the job's --gpus-per-node"
        )
    problems += gpu_problems()
    facts = {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
        "gpus": gpus,
        "free_gib": {path: round(gib, 1) for path, gib in free.items()},
        "shm_gib": round(shm, 1),
        "open_files": files,
    }
    return facts, problems


def _free_gib(path: Path) -> float:
    try:
        return shutil.disk_usage(path).free / _GIB
    except OSError:
        return 0.0


def _answer(server: socket.socket, record: Record, clock: Callable[[], float]) -> None:
    """Send this node's name and time to every client that connects, until the server is closed."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        # the client may have disconnected or may not belong to the job: continue with the others
        with connection, suppress(OSError):
            said = {"node": record.node, "nonce": record.nonce, "time": clock()}
            connection.sendall(json.dumps(said).encode())


def _visit(
    record: Record, other: str, found: Mapping[str, Any], clock: Callable[[], float]
) -> None:
    """Connect to another node at the address in its file, compare its reply with the file, and
    record its clock offset.
    """
    address = (str(found.get("address", "")), int(found.get("port", 0)))
    try:
        started = clock()
        with socket.create_connection(address, timeout=_CONNECT_S) as connection:
            said = json.loads(connection.makefile("rb").read(4096))
        ended = clock()
        if not isinstance(said, dict):
            raise ValueError(f"unexpected answer {said!r:.40}")
    except (OSError, ValueError) as error:
        record.complaints[other] = (
            f"{record.node} cannot connect to {address[0]}:{address[1]} ({error}); check firewall "
            "and `interface`"
        )
        return
    if said.get("nonce") != found.get("nonce"):
        record.complaints[other] = (
            f"{record.node} reaches {said.get('node')} at {address[0]}, not {other}; choose "
            "another `interface`"
        )
        return
    # The answer was written at some moment in this interval, which may last seconds on a busy node.
    # Only an offset beyond the interval counts.
    offset = float(said["time"]) - (started + ended) / 2
    record.clocks[other] = round(
        math.copysign(max(abs(offset) - (ended - started) / 2, 0.0), offset), 3
    )


def _await(paths: Iterable[Path], deadline: float) -> Iterable[tuple[str, dict[str, Any] | None]]:
    """Yield (name, content) for each file as soon as it exists; content is None for files that are
    still missing at the deadline."""
    missing = list(paths)
    while missing:
        left = []
        for path in missing:
            if (value := records.read(path)) is not None:
                yield path.stem, value
            else:
                left.append(path)
        if (missing := left) and time.monotonic() >= deadline:
            yield from ((path.stem, None) for path in missing)
            return
        if missing:
            time.sleep(_POLL_S)
