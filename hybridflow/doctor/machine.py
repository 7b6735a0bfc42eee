"""Checks of this machine's hardware, packages and cluster: whether a run would use them and, if
not, why and how to fix it.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata, util
from pathlib import Path

import psutil

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.doctor.findings import Finding, Level
from hybridflow.errors import HybridFlowError
from hybridflow.launch.node import FIRST_PORT
from hybridflow.observe.environment import query_gpus
from hybridflow.process.obstacles import obstacles

_GIB = 2**30
# required packages; the exact versions are in requirements/
NEEDED = ("torch", "megatron-core", "ray", "transformers", "numpy", "pyarrow", "hydra-core")
LOCKED = ((3, 11), (3, 12))  # requirements/cpu.txt and gpu.txt
# optional package -> (module, its use)
FASTER = {
    "transformer-engine": ("transformer_engine", "Megatron's fused layers and FP8"),
    "apex": ("apex", "Megatron's fused normalisation and gradient accumulation"),
    "flash-attn": ("flash_attn", "Megatron's attention"),
    "deep-ep": ("deep_ep", "the expert all-to-all of Megatron and the engines"),
}


def examine(config: RunConfig | None = None) -> list[Finding]:
    """Return all findings for this machine. Given a recipe, also check its requirements: GPUs,
    memory, folders."""
    gpus, trouble = query_gpus()
    findings = [
        *_versions(),
        *_devices(gpus, trouble, config),
        *_faster(bool(gpus)),
        *_network(bool(gpus)),
        *_limits(),
    ]
    findings += [Finding(one.topic, one.level, one.what, one.remedy) for one in obstacles()]
    return [*findings, *_disk(config), *_cluster(config)]


def _versions() -> Iterator[Finding]:
    right = sys.version_info[:2] in LOCKED
    version = ".".join(map(str, sys.version_info[:3]))
    remedy = (
        ""
        if right
        else "versions are pinned for Python 3.11 (cpu) and 3.12 (gpu): run "
        "PYTHON=/path/to/python make setup"
    )
    yield Finding("python", "ok" if right else "warning", version, remedy)
    for name in (*NEEDED, RunConfig().rollout.engine):
        found = _version(name)
        if found is None:
            yield Finding(
                name, "error", "not installed", "run make setup (LANE=gpu on a machine with GPUs)"
            )
        else:
            yield Finding(name, "ok", found)
    if util.find_spec("hybridflow_kernels") is None:
        yield Finding(
            "kernels",
            "error",
            "hybridflow_kernels is not installed",
            "build the package together with the folder kernels/",
        )


def _devices(gpus: Sequence[str], trouble: str, config: RunConfig | None) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    yield Finding("cpu", "ok", f"{cores} cores usable, {memory.total / _GIB:.0f} GiB of memory")
    wanted = config.cluster.procs_per_node if config is not None else 0
    if trouble:
        remedy = (
            "fix the driver: load its module, or reboot after an update; without it the GPUs stay "
            "unused"
        )
        yield Finding("gpu", "error", trouble, remedy)
        return
    if not gpus:
        where = "no GPU: nvidia-smi is not installed or lists none; runs use CPUs and gloo"
        yield Finding(
            "gpu",
            "unused",
            where,
            "on a GPU machine, install the driver or request --gpus-per-node from Slurm",
        )
        return
    yield Finding("gpu", "ok", f"{len(gpus)} x {gpus[0]}")
    cuda = _torch_cuda()
    if cuda is None:
        yield Finding(
            "torch.cuda",
            "error",
            "torch was built without CUDA, so the GPUs stay unused",
            "run make setup LANE=gpu",
        )
    if wanted > len(gpus):
        what = f"the recipe needs {wanted} ranks per node, but this node has {len(gpus)} GPUs"
        remedy = f"set cluster.procs_per_node={len(gpus)} and raise cluster.nodes"
        yield Finding("recipe", "error", what, remedy)


def _faster(has_gpus: bool) -> Iterator[Finding]:
    for name, (module, use) in FASTER.items():
        if util.find_spec(module) is not None:
            level: Level = "ok" if has_gpus else "unused"
            yield Finding(
                name,
                level,
                f"{_version(name) or 'installed'}: {use}" + ("" if has_gpus else "; needs a GPU"),
            )
        elif has_gpus:
            yield Finding(
                name,
                "warning",
                f"not installed, which slows down {use}",
                f"use an image from launch/containers/, or install {name}",
            )
        else:
            yield Finding(name, "unused", f"not installed; used only on GPUs, for {use}")


def _network(has_gpus: bool) -> Iterator[Finding]:
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if devices:
        yield Finding("rdma", "ok", ", ".join(devices))
        if not os.access("/dev/infiniband/rdma_cm", os.R_OK | os.W_OK):
            what = "/dev/infiniband/rdma_cm is not accessible"
            remedy = "mount /dev/infiniband into the container"
            yield Finding("rdma", "warning", what, remedy)
    else:
        level: Level = "warning" if has_gpus else "unused"
        yield Finding(
            "rdma",
            level,
            "no InfiniBand or RoCE device; nodes communicate over TCP",
            "load the drivers (ibstat)" * has_gpus,
        )
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        yield Finding(
            "host name",
            "warning",
            f"{name} has no address ({error})",
            "add it to /etc/hosts, or set `interface`",
        )
        return
    loopback = address.startswith("127.")
    remedy = (
        "set `interface` in the site file so that nodes do not connect on loopback"
        if loopback
        else ""
    )
    what = f"{name} resolves to {address}"
    yield Finding("host name", "warning" if loopback else "ok", what, remedy)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < FIRST_PORT + 2000:
        what = (
            f"ephemeral ports start at {first}, which leaves Ray too few ports above {FIRST_PORT}"
        )
        remedy = 'run sysctl net.ipv4.ip_local_port_range="32768 60999"'
        yield Finding("ports", "error", what, remedy)
    else:
        yield Finding("ports", "ok", f"{FIRST_PORT} to {first - 1} for Ray's services")


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = files != resource.RLIM_INFINITY and files < 65536
    remedy = (
        "set LimitNOFILE=infinity for slurmd, or nofile in /etc/security/limits.conf" if few else ""
    )
    yield Finding("nofile", "warning" if few else "ok", f"{_amount(files)} open files", remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    rdma = any(Path("/sys/class/infiniband").glob("*"))
    short = rdma and locked != resource.RLIM_INFINITY
    remedy = "set LimitMEMLOCK=infinity for slurmd, because RDMA pins memory" if short else ""
    yield Finding("memlock", "warning" if short else "ok", f"{_amount(locked)} bytes", remedy)
    free = shutil.disk_usage("/dev/shm").free / _GIB
    remedy = (
        "raise the container's --shm-size or remount it larger; Ray stores objects there"
        if free < 1
        else ""
    )
    yield Finding("/dev/shm", "warning" if free < 1 else "ok", f"{free:.1f} GiB free", remedy)


def _disk(config: RunConfig | None) -> Iterator[Finding]:
    folders = [
        Path(tempfile.gettempdir()),
        Path(config.output_dir) if config is not None else Path.cwd(),
    ]
    for folder in folders:
        there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
        if not os.access(there, os.W_OK):
            yield Finding(
                "disk",
                "error",
                f"{folder} is not writable",
                "choose another output_dir or TMPDIR",
            )
            continue
        free = shutil.disk_usage(there).free / _GIB
        remedy = "free space, or choose another output_dir or TMPDIR" if free < 5 else ""
        yield Finding(
            "disk", "warning" if free < 5 else "ok", f"{folder}: {free:.0f} GiB free", remedy
        )
    kind = _filesystem(folders[1])
    shared = kind in {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "cephfs",
        "ceph",
        "fuse",
        "wekafs",
        "afs",
    }
    several = config is not None and config.cluster.nodes > 1
    remedy = "set output_dir to a folder that all nodes mount" if several and not shared else ""
    what = f"output folder on {kind}{'' if shared else ', usually not shared between nodes'}"
    yield Finding("shared filesystem", "warning" if remedy else "ok", what, remedy)


def _cluster(config: RunConfig | None) -> Iterator[Finding]:
    if shutil.which("sinfo") is None:
        yield Finding(
            "slurm",
            "unused",
            "sinfo not found",
            "on a login node, load the Slurm module" if _in_slurm() else "",
        )
    else:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %D %T"],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = "; ".join(done.stdout.splitlines())
        if done.returncode:
            said = (
                done.stderr.strip().splitlines() or [f"sinfo exited with status {done.returncode}"]
            )[-1]
            level: Level = "error" if _in_slurm() else "warning"
            yield Finding(
                "slurm",
                level,
                said,
                "check that slurmctld is up (scontrol ping), and check SLURM_CONF",
            )
        else:
            yield Finding("slurm", "ok", lines)
    address = config.cluster.address if config is not None else os.environ.get("RAY_ADDRESS")
    if not address or address == "auto":
        yield Finding("ray cluster", "unused", "none given; a run starts its own")
        return
    from hybridflow.single_controller.cluster import wait_for_nodes

    try:
        wait_for_nodes(address, config.cluster.nodes if config is not None else 1, 10.0)
        yield Finding("ray cluster", "ok", f"{address} responds")
    except HybridFlowError as error:
        yield Finding(
            "ray cluster", "error", str(error), "check the address and RAY_AUTH_TOKEN_PATH"
        )


def recipe_findings(load: Callable[[], RunConfig]) -> tuple[RunConfig | None, list[Finding]]:
    """Load the recipe. Returns its configuration (None if the recipe is rejected) and the findings
    about it.
    """
    try:
        config = load()
    except HybridFlowError as error:
        return None, [
            Finding(
                "recipe", "error", str(error), "correct the key; --print-config lists all settings"
            )
        ]
    world = derived.world_size(config)
    return config, [
        Finding("recipe", "ok", f"{config.name}: {world} ranks on {config.cluster.nodes} node(s)")
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA version for which torch was built, read from its version file without
    importing torch, or None for a build without CUDA."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if line.startswith("cuda")), "")
    return None if "None" in line or "=" not in line else line.rpartition("=")[2].strip(" '\"")


def _filesystem(folder: Path) -> str:
    """Return the type of the filesystem that contains `folder`, or would contain it once it is
    created."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    mounted = [
        part for part in psutil.disk_partitions(all=True) if there.is_relative_to(part.mountpoint)
    ]
    return (
        max(mounted, key=lambda part: len(part.mountpoint)).fstype
        if mounted
        else "an unknown filesystem"
    )


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _in_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ
