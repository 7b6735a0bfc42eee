"""The site file: what an admin writes once for all users of a cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hybridflow.config.build import build_options
from hybridflow.errors import ConfigError

VARIABLE = "HYBRIDFLOW_SITE"
_JOIN_NODES = 8
_JOIN_NODE_S = 2


@dataclass(frozen=True)
class Container:
    """The image that every process of a job runs in."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None  # of pyxis (srun --container-image) or a .sif file
    mounts: tuple[str, ...] = ()  # SOURCE:TARGET; the working directory is always mounted
    python: str = "python3"  # in the image


@dataclass(frozen=True)
class Environment:
    """The Python environment on the nodes, without a container."""

    python: str | None = None  # null: the one that runs `hybridflow slurm submit`
    # a tar file that each node unpacks into `local` before anything else
    archive: str | None = None
    local: str | None = None  # node-local folder for `archive`; name `python` in it


@dataclass(frozen=True)
class Limits:
    """What preflight asks of each node, and deadlines."""

    min_free_gib: float = 5.0  # in the node's temporary folder and in the output folder
    min_shm_gib: float = 1.0  # /dev/shm, where Ray keeps objects
    min_open_files: int = 4096  # ulimit -n
    max_clock_skew_s: float = 2.0
    preflight_timeout_s: int = 120
    # until every node of up to eight has joined Ray; each further one adds two seconds
    start_timeout_s: int = 300

    def join_timeout_s(self, nodes: int) -> int:
        """Seconds until every node must have joined Ray: they read its libraries from a disk that
        all of them share."""
        return self.start_timeout_s + _JOIN_NODE_S * max(nodes - _JOIN_NODES, 0)


@dataclass(frozen=True)
class Site:
    """Defaults of `hybridflow slurm submit` on one cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gpus_per_node: int = 0
    exclusive: bool = True
    sbatch: tuple[str, ...] = ()  # further options, as --constraint=h200
    srun: tuple[str, ...] = ()  # further options of each step, as --mpi=none
    # network interface of Ray; null: the address that Slurm knows the node by
    interface: str | None = None
    object_store_gib: float | None = None  # null: as Ray chooses
    prolog: tuple[str, ...] = ()  # shell lines before anything else: module load, source, export
    container: Container = field(default_factory=Container)
    environment: Environment = field(default_factory=Environment)
    limits: Limits = field(default_factory=Limits)
    body: str | None = None  # an edited copy of launch/slurm/job.sh


def read_site(path: Path | None) -> Site:
    """The site file at `path`, else the one that $HYBRIDFLOW_SITE names, else plain defaults.

    Raises:
        ConfigError: no such file, or a wrong key or value in it.
    """
    named = os.environ.get(VARIABLE)
    path = path or (Path(named) if named else None)
    if path is None:
        return Site()
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"site file {path}: cannot be read ({error}); check --site or ${VARIABLE}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"site file {path} is not YAML: {' '.join(str(error).split())}"
        ) from error
    site: Site = build_options(Site(), values, "site")
    container = site.container
    if container.kind != "none" and not container.image:
        raise ConfigError(
            f"site.container.kind is {container.kind}: site.container.image names no image"
        )
    if bool(site.environment.archive) != bool(site.environment.local):
        raise ConfigError(
            "site.environment.archive and site.environment.local go together; set both or none"
        )
    return site
