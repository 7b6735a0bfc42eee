"""The site file: settings that an administrator defines once for all users of a cluster."""

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
    """The container image used by every process of a job."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None  # an image for pyxis (srun --container-image), or a .sif file
    mounts: tuple[str, ...] = ()  # SOURCE:TARGET; the working directory is always mounted
    python: str = "python3"  # in the image


@dataclass(frozen=True)
class Environment:
    """The Python environment on the nodes if no container is used."""

    python: str | None = None  # null: the one that runs `hybridflow slurm submit`
    # a tar file that each node unpacks into `local` before anything else
    archive: str | None = None
    local: str | None = None  # node-local folder for `archive`; name `python` in it


@dataclass(frozen=True)
class Limits:
    """Preflight requirements for each node, and deadlines."""

    min_free_gib: float = 5.0  # in the node's temporary folder and in the output folder
    min_shm_gib: float = 1.0  # /dev/shm, where Ray keeps objects
    min_open_files: int = 4096  # ulimit -n
    max_clock_skew_s: float = 2.0
    preflight_timeout_s: int = 120
    bad_node_hours: float = 24.0  # how long jobs avoid a node of `bad_nodes`
    # for up to eight nodes to join Ray; each further node adds two seconds
    start_timeout_s: int = 300

    def join_timeout_s(self, nodes: int) -> int:
        """Return the time within which every node must join Ray, in seconds. It increases with the
        number of nodes, because all nodes read Ray's libraries from a shared disk.
        """
        return self.start_timeout_s + _JOIN_NODE_S * max(nodes - _JOIN_NODES, 0)


@dataclass(frozen=True)
class Site:
    """Default options of `hybridflow slurm submit` for one cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gpus_per_node: int = 0
    exclusive: bool = True
    sbatch: tuple[str, ...] = ()  # additional options, such as --constraint=h200
    srun: tuple[str, ...] = ()  # additional options of each step, such as --mpi=none
    # network interface of Ray; null: the node's address in Slurm
    interface: str | None = None
    object_store_gib: float | None = None  # null: Ray's default
    prolog: tuple[str, ...] = ()  # shell lines that run first: module load, source, export
    container: Container = field(default_factory=Container)
    environment: Environment = field(default_factory=Environment)
    limits: Limits = field(default_factory=Limits)
    # file on a shared filesystem in which jobs record the nodes that their preflight excluded, and
    # that later jobs read; its permissions decide who may exclude nodes for whom
    bad_nodes: str | None = None
    body: str | None = None  # an edited copy of launch/slurm/job.sh


def read_site(path: Path | None) -> Site:
    """Read the site file at `path`, or else the one given by $HYBRIDFLOW_SITE. If neither is set,
    return the defaults.

    Raises:
        ConfigError: the file does not exist, or contains an invalid key or value.
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
            f"could not read the site file {path} ({error}); check --site or ${VARIABLE}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"site file {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    site: Site = build_options(Site(), values, "site")
    container = site.container
    if container.kind != "none" and not container.image:
        raise ConfigError(
            f"site.container.kind is {container.kind}, but no image is given; set "
            "site.container.image"
        )
    if bool(site.environment.archive) != bool(site.environment.local):
        raise ConfigError(
            "site.environment.archive and site.environment.local must be set together"
        )
    return site
