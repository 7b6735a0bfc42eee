"""Generation of a job's sbatch file: #SBATCH lines and settings, followed by the body that all jobs
share (launch/slurm/job.sh).
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.locate import shipped_dir
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.launch import bad_nodes
from hybridflow.launch.site import Site
from hybridflow.placement.preview import preview

# fraction of the timeout spent waiting for the other nodes' files; the rest is for starting Python
# and connecting
PREFLIGHT_SHARE = 0.5


@dataclass(frozen=True)
class Job:
    """A requested job; paths are absolute.

    Attributes:
        words: the driver's command (`launch.driver.command`), for example ("train",
            "--config-name", "x").
        nodes: number of nodes that the run uses, including `other_nodes`.
        other_nodes: number of these nodes in the second part of a heterogeneous job, which uses the
            sbatch options `other_options`.
        spares: number of additional nodes that replace bad ones.
        grace_s: time for a checkpoint before Slurm reclaims the nodes, in seconds.
        drain: True if a benchmark job drains outlier nodes.
        body: the file in launch/slurm/ that follows the settings; a site's `body` replaces only
            job.sh.
    """

    name: str
    words: tuple[str, ...]
    workdir: Path
    out: Path
    run_dir: Path
    nodes: int = 1
    other_nodes: int = 0
    other_options: tuple[str, ...] = ()
    spares: int = 0
    gpus_per_node: int = 0
    time: str | None = None
    array: str | None = None
    dependency: str | None = None
    max_restarts: int = 3
    grace_s: int = 180
    options: tuple[str, ...] = ()
    drain: bool = False
    body: str = "job.sh"


def nodes_of(config: RunConfig, job: str = "train") -> int:
    """Return the number of nodes that the run's processes and engines require. If
    `cluster.devices_per_node` is set, it is computed by the placement.

    Raises:
        ResourceError: the run does not fit on any number of nodes with this many GPUs.
    """
    if config.cluster.devices_per_node is not None and (placed := preview(config, job)) is not None:
        return max(config.cluster.nodes, len(placed.cluster.nodes))
    rollout = config.rollout
    engines = rollout.num_engines * rollout.nodes_per_engine if rollout.nodes_per_engine > 1 else 1
    return max(config.cluster.nodes, engines)


def check(job: Job) -> None:
    """Raise ConfigError if the job's settings are invalid or inconsistent."""
    if job.nodes < 1 or job.spares < 0 or not 0 <= job.other_nodes < job.nodes:
        raise ConfigError(
            f"--nodes {job.nodes} --other-nodes {job.other_nodes} --spares {job.spares}: the first "
            "component must have at least one node, and no value may be negative"
        )
    if job.other_nodes and job.spares:
        raise ConfigError(
            "--spares cannot be used with --other-nodes: a spare cannot replace a node given by "
            "--other-nodes"
        )
    if job.grace_s < 1 or job.max_restarts < 0:
        raise ConfigError(
            f"--grace {job.grace_s} --max-restarts {job.max_restarts}: --grace must be at least 1, "
            "--max-restarts at least 0"
        )
    if "\n" in f"{job.name}{job.workdir}{job.out}{job.run_dir}":
        raise ConfigError("the run's name and folders may not contain line breaks")


def render(job: Job, site: Site) -> str:
    """Return the complete sbatch file.

    Raises:
        ConfigError: the settings are invalid or inconsistent, or the site's `body` cannot be read.
    """
    check(job)
    path = (
        Path(site.body)
        if site.body and job.body == "job.sh"
        else shipped_dir("launch") / "slurm" / job.body
    )
    try:
        body = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"site.body: could not read {path} ({error})") from error
    parts = ["#!/bin/bash", *_directives(job, site), "", *_settings(job, site), ""]
    return "\n".join(parts) + "\n" + body


def _directives(job: Job, site: Site) -> list[str]:
    asked = [
        f"--job-name={_quoted(job.name)}",
        f"--output={_quoted(str(job.out).replace('%', '%%') + '/%j.out')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.grace_s}",
    ]
    asked += [f"--account={_quoted(site.account)}"] if site.account else []
    asked += [f"--qos={_quoted(site.qos)}"] if site.qos else []
    asked += [f"--array={job.array}"] if job.array else []
    asked += [f"--dependency={job.dependency}"] if job.dependency else []
    first = _part(job, site, job.nodes - job.other_nodes + job.spares)
    avoided = ",".join(bad_nodes.excluded(site))
    first += [f"--exclude={avoided}"] if avoided else []
    lines = [f"#SBATCH {option}" for option in [*asked, *first, *site.sbatch, *job.options]]
    if job.other_nodes:
        other = [*_part(job, site, job.other_nodes), *site.sbatch, *job.other_options]
        lines += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in other)]
    return lines


def _part(job: Job, site: Site, nodes: int) -> list[str]:
    """Return the sbatch options shared by both parts of a heterogeneous job."""
    asked = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    asked += ["--exclusive"] if site.exclusive else []
    asked += [f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    asked += [f"--partition={site.partition}"] if site.partition else []
    asked += [f"--time={time}"] if (time := job.time or site.time) else []
    return asked


def _settings(job: Job, site: Site) -> list[str]:
    limits = site.limits
    python = (
        site.container.python
        if site.container.kind != "none"
        else site.environment.python or sys.executable
    )
    return [
        "# ---- the site's lines",
        *site.prolog,
        "",
        "# ---- settings of this job",
        _assign("WORKDIR", str(job.workdir)),
        _assign("OUT", str(job.out)),
        _assign("RUN_DIR", str(job.run_dir)),
        _assign("PYTHON", python),
        _assign("NODES", str(job.nodes)),
        _assign("MAX_RESTARTS", str(job.max_restarts)),
        _assign("GRACE", str(max(1, job.grace_s * 2 // 3)))
        + "  # seconds for the final checkpoint, before Slurm takes the nodes",
        _assign("START_TIMEOUT", str(limits.join_timeout_s(job.nodes))),
        _assign("PREFLIGHT_TIMEOUT", str(limits.preflight_timeout_s)),
        *([_assign("BAD_NODES", site.bad_nodes)] if site.bad_nodes else []),
        *([_assign("DRAIN", "1")] if job.drain else []),
        _assign("MAX_CLOCK_SKEW", f"{limits.max_clock_skew_s:g}"),
        _assign("ARCHIVE", site.environment.archive or ""),
        _assign("LOCAL", site.environment.local or ""),
        *_launchers(job, site),
        _array("PREFLIGHT", _preflight(job, site)),
        _array("RAY", _ray(job, site)),
        _array("TRAIN", job.words),
    ]


def _launchers(job: Job, site: Site) -> list[str]:
    """Return three shell settings: srun's options (SRUN), and the prefixes of commands inside srun
    (CONTAINER) and of commands that run only on this node (HERE).
    """
    container = site.container
    folders = [job.workdir] if job.out.is_relative_to(job.workdir) else [job.workdir, job.out]
    mounts = [*(f"{folder}:{folder}" for folder in folders), *container.mounts]
    srun = list(site.srun)
    prefix: list[str] = []
    here: list[str] = []
    if container.kind == "pyxis":
        srun += [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
        srun += [f"--container-workdir={job.workdir}"]
        here = ["srun", *srun, "--overlap", "--nodes=1", "--ntasks=1"]
    elif container.kind == "apptainer":
        prefix = [
            "apptainer",
            "exec",
            *(["--nv"] if job.gpus_per_node else []),
            f"--pwd={job.workdir}",
        ]
        prefix += [*(f"--bind={mount}" for mount in mounts), str(container.image)]
        here = prefix
    return [_array("SRUN", srun), _array("CONTAINER", prefix), _array("HERE", here)]


def _preflight(job: Job, site: Site) -> list[str]:
    limits = site.limits
    options = [
        f"--gpus={job.gpus_per_node}",
        f"--min-free-gib={limits.min_free_gib:g}",
        f"--min-shm-gib={limits.min_shm_gib:g}",
        f"--min-open-files={limits.min_open_files}",
        f"--timeout={math.ceil(limits.preflight_timeout_s * PREFLIGHT_SHARE)}",
    ]
    return [*options, f"--interface={site.interface}"] if site.interface else options


def _ray(job: Job, site: Site) -> list[str]:
    timeout = site.limits.join_timeout_s(job.nodes)
    options = [f"--gpus={job.gpus_per_node}", f"--start-timeout={timeout}"]
    return (
        [*options, f"--object-store-gib={site.object_store_gib:g}"]
        if site.object_store_gib
        else options
    )


def _assign(name: str, value: str) -> str:
    return f"{name}={shlex.quote(value)}" if value else f"{name}=''"


def _array(name: str, values: Sequence[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, values))})"


def _quoted(value: str) -> str:
    """Quote a value for an #SBATCH line, where Slurm interprets quotes and backslashes as a shell
    does."""
    if all(letter.isalnum() or letter in "-_./%:,@=+" for letter in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
