"""The processes of a run, what each of them is, and every socket on which they listen, read from
/proc."""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil

# what a process of a run is, by its command line or title; the first that fits
ROLES = (
    (r"process[./]fork_server", "fork server"),
    (r"guard\.py", "guard"),
    (r"^\S*srun ", "Slurm srun"),
    (r"slurm_script", "job script"),
    (r"hybridflow\.launch", "job step"),
    (r"rewards\.host", "rewards"),
    (r"gcs_server", "Ray gcs"),
    (r"^\S*/raylet/raylet ", "Ray raylet"),
    (r"default_worker\.py|ray::Host|ray::_Observer", "worker"),
    (r"runtime_env.*agent|ray::RuntimeEnvAgent", "Ray runtime-env agent"),
    (r"dashboard/dashboard\.py", "Ray dashboard"),
    (r"dashboard.*agent|ray::DashboardAgent", "Ray agent"),
    (r"log_monitor|monitor\.py", "Ray monitor"),
    (r"ray\.util\.client", "Ray client server"),
    (r"ray\.scripts|bin/ray start", "Ray start"),
    (r"sglang::scheduler", "engine rank"),
    (r"sglang::detokenizer", "engine detokenizer"),
    (r"sglang::data_parallel", "engine data-parallel controller"),
    (r"sglang", "engine server"),
    (r"hybridflow", "driver"),
)


@dataclass(frozen=True)
class Listener:
    """A socket that takes connections: `address` is host:port, a path, or "@name" in the abstract
    namespace."""

    pid: int
    role: str
    kind: str
    address: str

    @property
    def is_reachable(self) -> bool:
        """Whether another user of the machine can connect: a path only if every folder above lets
        them pass."""
        if self.kind == "tcp" or self.address.startswith("@"):
            return True
        path = Path(self.address)
        try:
            modes = [parent.stat().st_mode for parent in path.parents]
            return all(mode & stat.S_IXOTH for mode in modes) and bool(
                path.stat().st_mode & stat.S_IWOTH
            )
        except FileNotFoundError:
            return False  # removed: nobody can name it any more


def processes_of(driver: int) -> list[psutil.Process]:
    """The driver and all processes that descend from it."""
    root = psutil.Process(driver)
    return [root, *root.children(recursive=True)]


def role_of(process: psutil.Process) -> str:
    """What the process is in the run."""
    try:
        role = _role(" ".join(process.cmdline()))
        parent = process.parent()
        # a server that its guard has forked keeps the guard's title
        if role == "guard" and parent is not None and _role(" ".join(parent.cmdline())) == "guard":
            return "engine server"
    except psutil.Error:
        return "ended"
    return role


def _role(words: str) -> str:
    return next((role for pattern, role in ROLES if re.search(pattern, words)), words[:40].strip())


def listeners(processes: list[psutil.Process]) -> list[Listener]:
    """The listening sockets of the processes: TCP, and unix stream sockets with a name."""
    names = {**_tcp("tcp", socket.AF_INET), **_tcp("tcp6", socket.AF_INET6), **_unix()}
    found = {}
    for process in processes:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:
            continue  # it has ended
        for link in links:
            if link.startswith("socket:[") and (named := names.get(link[8:-1])):
                found.setdefault(named, Listener(process.pid, role_of(process), *named))
    return sorted(found.values(), key=lambda one: (one.role, one.kind, one.address))


def _tcp(name: str, family: socket.AddressFamily) -> dict[str, tuple[str, str]]:
    found = {}
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":  # listening
            host, port = fields[1].split(":")
            words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
            found[fields[9]] = (
                "tcp",
                f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}",
            )
    return found


def _unix() -> dict[str, tuple[str, str]]:
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & 0x10000:  # it listens
            found[fields[6]] = ("unix", fields[7])
    return found
