"""Ray on one node of a job. This process starts and monitors Ray, reports why it exited, and cleans
up.

Slurm sends SIGTERM to every process of a step when it is about to reclaim the nodes. Ray must keep
running until the driver has written its checkpoint, so it runs in a separate session, and this
process only records the signal. SIGUSR2, sent by the job's script, stops Ray. If this process is
killed, a guard cleans up.
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

# above Ray's default worker ports (10002-19999), below the ephemeral ports
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
_STARTS = 3  # attempts to start Ray on a node, until all nodes have joined
_POLL_S = 0.2
_STACK = "*** StackTrace Information ***"  # follows Ray's message
_LEAKING = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PMI_", "PMIX_", "PALS_", "OMPI_", "HYDRA_")


@dataclass(frozen=True)
class RayOptions:
    """Options for starting Ray on each node. If `object_store_gib` is None, Ray's default
    applies."""

    gpus: int = 0
    object_store_gib: float | None = None
    start_timeout_s: float = 300.0


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the environment variables set by Slurm and MPI launchers, which would make libraries
    mistake Ray's workers for MPI ranks. Also remove variables that a local run has set in the
    submitting process: a Ray token, which would override the job's token, and the variable that
    confines Ray to one machine.
    """
    dropped = ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    kept: dict[str, str] = {}
    for name, value in environment.items():
        if not name.startswith(_LEAKING) and name not in dropped:
            kept[name] = value
    return kept


def choose_ports(job_id: int, position: int, address: str) -> dict[str, int]:
    """Choose free ports for Ray, keyed by `ray start` option. The block of ports is derived from
    the job id and the node's position in the job, so that two jobs on a node do not collide; if it
    is taken, other blocks are tried.

    Raises:
        ResourceError: every block that was tried is taken.
    """
    blocks = (_first_ephemeral_port() - FIRST_PORT) // len(PORTS)
    if blocks < _TRIES:
        raise ResourceError(
            f"the ephemeral ports begin at {_first_ephemeral_port()}, which leaves no ports for "
            f"Ray above {FIRST_PORT}; raise net.ipv4.ip_local_port_range on this node"
        )
    tried = []
    for attempt in range(_TRIES):
        block = (job_id * 37 + position + attempt * 101) % blocks
        ports = range(FIRST_PORT + block * len(PORTS), FIRST_PORT + (block + 1) * len(PORTS))
        if all(_is_free(address, port) for port in ports):
            return dict(zip(PORTS, ports, strict=True))
        tried.append(f"{ports[0]}-{ports[-1]}")
    raise ResourceError(
        f"no free ports for Ray on {address}: some of {', '.join(tried)} are taken; see `ss -ltnp`"
    )


def run(node: str, folder: Path, options: RayOptions, job_id: int) -> int:
    """Start Ray on this node if preflight has chosen it, and wait until Ray exits or SIGUSR2
    arrives.

    Returns:
        0 if asked to stop or not chosen; 1 if Ray exited, with the reason in `failed-NODE.json`.
    """
    chosen = (records.read(folder / records.CHOSEN) or {}).get("use", [])
    position = next((number for number, entry in enumerate(chosen) if entry["node"] == node), None)
    if position is None:
        print(f"{node} is not needed", flush=True)
        return 0
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        # if a node fails, srun terminates the step's other nodes with SIGTERM
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
            return _run_ray(node, folder, command, temporary, asked, announce)
    except ResourceError as error:
        _report(folder, node, str(error), "")
        return 1


@contextmanager
def _private_folder(job_id: int) -> Iterator[Path]:
    """Create a private folder and yield the path for Ray's temporary folder in it. A guard removes
    the folder if this process dies."""
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


def _run_ray(
    node: str,
    folder: Path,
    command: list[str],
    temporary: Path,
    asked: list[int],
    announce: Callable[[], bool] | None,
) -> int:
    """Run Ray until it exits, restarting it if it exits before all nodes have joined. Returns the
    exit status that `run` returns."""
    for start in range(1, _STARTS + 1):
        with _ray(node, folder, command, temporary) as ray:
            status = _wait(ray, folder, asked, announce)
            if status is None:
                return 0
            # Ray's own components have fixed start-up deadlines, which a busy node may exceed
            # (ray-project/ray#65983).
            if start == _STARTS or (folder / records.DRIVER_LOG).exists():
                # Reported before the rest of Ray is cleaned up. Otherwise a driver on this node
                # would fail first and seem to be the cause.
                log_tail = _ray_log(temporary) or records.tail(
                    folder / records.NODE_LOG.format(node)
                )
                _report(folder, node, f"Ray exited with status {status}", log_tail)
                return 1
        print(
            f"{node}: Ray exited with status {status} before all nodes had joined; restarting it",
            flush=True,
        )
    return 1


@contextmanager
def _ray(
    node: str, folder: Path, command: list[str], temporary: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start Ray. On exit from the block, stop it, save its logs and clean up."""
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
    """Wait until Ray exits by itself, and return its exit status. Returns None as soon as `asked`
    is not empty, or if Slurm has lost this node and restarted the job elsewhere. Meanwhile,
    `announce` is called repeatedly until it returns True.
    """
    while (status := ray.poll()) is None and not asked and not records.has_later_start(folder):
        if announce is not None and announce():
            announce = None
        time.sleep(_POLL_S)
    return status


def ray_command(
    head: str | None, address: str, ports: Mapping[str, int], temporary: Path, options: RayOptions
) -> list[str]:
    """Return the command that runs `ray start` in the foreground. If `head` is None, the command
    starts the head.
    """
    # Ray uses CPUs only to count slots; a small machine may run more processes than it has cores.
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
    # The kernel assigns worker ports: a fixed range would be shared with other jobs on the node.
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
    """Once the head is listening, publish its address to the other nodes and the driver, which send
    the job's token there. Returns True if it was published.

    Raises:
        ResourceError: another user is listening at the head's address.
    """
    users = listeners_at(address, port)
    if strangers := users - {os.getuid()}:
        raise ResourceError(
            f"port {port} of Ray's head on {address} was taken by user {min(strangers)} while Ray "
            "was starting; see `ss -ltnp` on that node, and submit the job again"
        )
    if users:
        records.write(folder / records.HEAD, {"address": f"{address}:{port}"})
    return bool(users)


def _await_head(folder: Path, timeout_s: float) -> str:
    """Return HOST:PORT of the head once it accepts connections."""
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
    where = f"at {address}" if address else f"({folder / records.HEAD} does not exist)"
    raise ResourceError(
        f"the Ray head node did not respond {where} within {timeout_s:.0f} s; see that node's log"
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
    """Return the last lines of the most informative non-empty log of Ray's daemons."""
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
    """Copy the logs of Ray's daemons from the node's local disk to the job's folder."""
    for source in temporary.glob("session_2*/logs/*"):
        if source.name.startswith(("raylet", "gcs_server", "ray_process_exit")):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / source.name)


def _stop(ray: subprocess.Popen[bytes]) -> None:
    """Kill `ray start`, and let `guard.clear_up` end the daemons. A regular Ray shutdown would
    first drain the node for 30 seconds.
    """
    with suppress(ProcessLookupError):  # it has exited
        os.killpg(ray.pid, signal.SIGKILL)
    ray.wait()
