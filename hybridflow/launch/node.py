"""Ray on one node of a job: starts it, watches it, says why it ended, and leaves nothing behind.

Slurm sends SIGTERM to every process of a step when it is about to take the nodes. Ray must outlive
that for as long as the driver writes its checkpoint: Ray runs in a session of its own, and this
process only takes note. SIGUSR2, which the job's script sends, ends Ray. If this process is killed,
a guard clears up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.errors import ResourceError
from hybridflow.launch import records
from hybridflow.process.listening import listeners_at
from hybridflow.process.private_folder import RAY, ROOM_FOR_RAY, make_private_folder
from hybridflow.single_controller import guard
from hybridflow.single_controller.cluster import SYSTEM_CONFIG

# above the ports that Ray gives workers by default (10002-19999), below the ephemeral ones
FIRST_PORT = 20000
PORTS = (
    "port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
)
_TRIES = 16
_STARTS = 3  # of Ray on a node, until all nodes have joined
_POLL_S = 0.2
_STACK = "*** StackTrace Information ***"  # after Ray's message
_LEAKING = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PMI_", "PMIX_", "PALS_", "OMPI_", "HYDRA_")


@dataclass(frozen=True)
class RayOptions:
    """How Ray is started on each node. `object_store_gib` None: as Ray chooses."""

    gpus: int = 0
    object_store_gib: float | None = None
    start_timeout_s: float = 300.0


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without Slurm's and the MPI launchers' variables, by which libraries would take Ray's workers
    for MPI ranks, and without what a local run leaves in a Python that then submits: a Ray token,
    which would take precedence over the job's, and the variable that confines Ray to one
    machine."""
    dropped = ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    kept: dict[str, str] = {}
    for name, value in environment.items():
        if not name.startswith(_LEAKING) and name not in dropped:
            kept[name] = value
    return kept


def choose_ports(job_id: int, position: int, address: str) -> dict[str, int]:
    """Free ports for Ray, by the name of `ray start`'s option: a block that follows from the job's
    number and the node's position in the job, so that two jobs on a node do not meet, or one of the
    next that is free.

    Raises:
        ResourceError: too many blocks are taken.
    """
    blocks = (_first_ephemeral_port() - FIRST_PORT) // len(PORTS)
    if blocks < _TRIES:
        raise ResourceError(
            f"the ephemeral ports begin at {_first_ephemeral_port()}, which leaves Ray none above "
            f"{FIRST_PORT}; raise net.ipv4.ip_local_port_range on this node"
        )
    tried = []
    for attempt in range(_TRIES):
        block = (job_id * 37 + position + attempt * 101) % blocks
        ports = range(FIRST_PORT + block * len(PORTS), FIRST_PORT + (block + 1) * len(PORTS))
        if all(_is_free(address, port) for port in ports):
            return dict(zip(PORTS, ports, strict=True))
        tried.append(f"{ports[0]}-{ports[-1]}")
    raise ResourceError(
        f"no free ports for Ray on {address}: of {', '.join(tried)} some are taken; see `ss -ltnp`"
    )


def run(node: str, folder: Path, options: RayOptions, job_id: int) -> int:
    """Start Ray on this node, when preflight has chosen it, and stay until Ray ends or SIGUSR2
    comes.

    Returns:
        0 when asked to stop or not chosen; 1 when Ray ended, with a `failed-NODE.json` that says
        why.
    """
    chosen = (records.read(folder / records.CHOSEN) or {}).get("use", [])
    position = next((number for number, entry in enumerate(chosen) if entry["node"] == node), None)
    if position is None:
        print(f"{node} is not needed", flush=True)
        return 0
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        # SIGTERM ends a step whose other node has failed
        if number == signal.SIGUSR2 or records.failures(folder):
            asked.append(number)

    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, stop)
    address = str(chosen[position]["address"])
    try:
        with _private_folder(job_id) as temporary:
            ports = choose_ports(job_id, position, address)
            head = _await_head(folder, options.start_timeout_s) if position else None
            command = ray_command(head, address, ports, temporary, options)
            announce = None if position else partial(_publish_head, folder, address, ports["port"])
            return _stay(node, folder, command, temporary, asked, announce)
    except ResourceError as error:
        _report(folder, node, str(error), "")
        return 1


@contextmanager
def _private_folder(job_id: int) -> Iterator[Path]:
    """What Ray is given as its temporary folder, inside of a private one; a guard clears up if this
    process dies."""
    private = make_private_folder(f"hf-job-{job_id}-", ROOM_FOR_RAY)
    watching = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(private), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield private / RAY
    finally:
        guard.clear_up(private)
        watching.kill()
        watching.wait()


def _stay(
    node: str,
    folder: Path,
    command: list[str],
    temporary: Path,
    asked: list[int],
    announce: Callable[[], bool] | None,
) -> int:
    """Start Ray, again as long as not all nodes have joined, and wait for its end; the status of
    `run`."""
    for start in range(1, _STARTS + 1):
        with _ray(node, folder, command, temporary) as ray:
            status = _wait(ray, folder, asked, announce)
            if status is None:
                return 0
            # Ray gives its own parts fixed times to start, which a busy node may exceed
            # (ray-project/ray#65983).
            if start == _STARTS or (folder / records.DRIVER_LOG).exists():
                # Told before the rest of Ray is cleared up, a driver on this node too: that would
                # seem the cause.
                log_tail = _ray_log(temporary) or records.tail(
                    folder / records.NODE_LOG.format(node)
                )
                _report(folder, node, f"Ray ended with status {status}", log_tail)
                return 1
        print(
            f"{node}: Ray ended with status {status} before all nodes had joined; starting it "
            "again",
            flush=True,
        )
    return 1


@contextmanager
def _ray(
    node: str, folder: Path, command: list[str], temporary: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start Ray; at the end keep its logs and clear up."""
    print(f"{node}: {' '.join(command[3:])}", flush=True)
    ray = subprocess.Popen(command, env=clean_environment(os.environ), start_new_session=True)
    try:
        yield ray
    finally:
        _stop(ray)
        _keep_logs(temporary, folder / "ray" / node)
        guard.clear_up(temporary)


def _wait(
    ray: subprocess.Popen[bytes],
    folder: Path,
    asked: list[int],
    announce: Callable[[], bool] | None,
) -> int | None:
    """Ray's exit status when it has ended by itself; None when something is in `asked`, or the job
    has a later start elsewhere since Slurm has lost this node. `announce` is called until it
    returns True."""
    while (status := ray.poll()) is None and not asked and not records.has_later_start(folder):
        if announce is not None and announce():
            announce = None
        time.sleep(_POLL_S)
    return status


def ray_command(
    head: str | None, address: str, ports: Mapping[str, int], temporary: Path, options: RayOptions
) -> list[str]:
    """`ray start` in the foreground; `head` None starts the head."""
    # Ray's CPUs only count slots; a small machine may hold more processes than it has cores.
    words = [
        sys.executable,
        "-P",
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        f"--num-cpus={max(os.cpu_count() or 1, 16)}",
    ]
    words += [
        f"--num-gpus={options.gpus}",
        f"--node-ip-address={address}",
        f"--temp-dir={temporary}",
    ]
    # Workers take ports from the kernel: a fixed range would be shared with other jobs of the node.
    words += [
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    ]
    words += [
        f"--{name}={port}"
        for name, port in ports.items()
        if head is None or name not in _OF_THE_HEAD
    ]
    if options.object_store_gib is not None:
        words.append(f"--object-store-memory={int(options.object_store_gib * 2**30)}")
    if head is None:
        return [
            *words,
            "--head",
            "--include-dashboard=false",
            f"--system-config={json.dumps(SYSTEM_CONFIG)}",
        ]
    return [*words, f"--address={head}"]


_OF_THE_HEAD = ("port", "ray-client-server-port")


def _publish_head(folder: Path, address: str, port: int) -> bool:
    """Tell the other nodes and the driver where the head is, once it listens; they send the job's
    token there.

    Raises:
        ResourceError: another user listens there.
    """
    users = listeners_at(address, port)
    if strangers := users - {os.getuid()}:
        raise ResourceError(
            f"the port {port} of Ray's head on {address} was taken by the user with the number "
            f"{min(strangers)} while Ray started; submit the job again, and see `ss -ltnp` on that "
            "node"
        )
    if users:
        records.write(folder / records.HEAD, {"address": f"{address}:{port}"})
    return bool(users)


def _await_head(folder: Path, timeout_s: float) -> str:
    """HOST:PORT of the head, once it accepts connections."""
    deadline = time.monotonic() + timeout_s
    address = None
    while time.monotonic() < deadline:
        if address is None:
            address = (records.read(folder / records.HEAD) or {}).get("address")
        if address is not None:
            host, _, port = str(address).rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=2.0).close()
                return str(address)
            except OSError:
                pass  # not yet
        time.sleep(_POLL_S)
    where = f"at {address}" if address else f"and {folder / records.HEAD} is absent"
    raise ResourceError(
        f"Ray's head does not answer {where} after {timeout_s:.0f} s; look at the head node's log"
    )


def _first_ephemeral_port() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def _is_free(address: str, port: int) -> bool:
    for host in (address, "0.0.0.0"):
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError:
            return False
    return True


def _report(folder: Path, node: str, what: str, log_tail: str) -> None:
    told: dict[str, Any] = {"node": node, "what": what, "tail": log_tail, "time": time.time()}
    records.write(folder / records.FAILED.format(node), told)
    print(f"{node}: {what}\n{log_tail}", flush=True)


def _ray_log(temporary: Path) -> str:
    """The end of what Ray's daemons wrote, those that say most first."""
    for name in (
        "ray_process_exit.log",
        "raylet.err",
        "gcs_server.err",
        "raylet.out",
        "gcs_server.out",
    ):
        for path in sorted(temporary.glob(f"session_2*/logs/{name}")):
            if text := records.tail(path, 200).partition(_STACK)[0].strip():
                return "\n".join(text.splitlines()[-20:])
    return ""


def _keep_logs(temporary: Path, target: Path) -> None:
    """Copy the daemons' logs, which lie on the node's own disk, into the job's folder."""
    for source in temporary.glob("session_2*/logs/*"):
        if source.name.startswith(("raylet", "gcs_server", "ray_process_exit")):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / source.name)


def _stop(ray: subprocess.Popen[bytes]) -> None:
    """End `ray start`; `guard.clear_up` ends the daemons. Asked to end, Ray would drain the node
    for 30 seconds."""
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(ray.pid, signal.SIGKILL)
    ray.wait()
