"""A run as a Slurm job: the options of a submission, and the job that they and the run's settings
describe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.launch.job import Job, nodes_of
from hybridflow.launch.site import Site, read_site

# any address: the job's own head replaces it (`launch.driver.run`)
_HEAD = "127.0.0.1:1"


@dataclass(frozen=True)
class Options:
    """The options of `hybridflow slurm submit`, under their names.

    Attributes:
        nodes: default: the number that the run's cluster and engines need.
        other_nodes: how many of them form the second part of a heterogeneous job, with the sbatch
            options `other_sbatch`.
        spares: spare nodes that replace bad ones.
        grace: seconds for a checkpoint before the end.
        site: the site file; None: the one that $HYBRIDFLOW_SITE names.
    """

    nodes: int | None = None
    other_nodes: int = 0
    other_sbatch: Sequence[str] = ()
    spares: int = 0
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    array: str | None = None
    dependency: str | None = None
    max_restarts: int = 3
    grace: int = 180
    site: Path | None = None
    sbatch: Sequence[str] = ()

    def read_site(self) -> Site:
        """Return the site file's defaults, overridden by these options."""
        site = read_site(self.site)
        return replace(
            site, partition=self.partition or site.partition, account=self.account or site.account
        )


def in_a_job(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration as the job will have it, with an address of Ray's head.

    Args:
        overrides: the user's settings (`key=value`). A `cluster.address` among them is refused;
            the recipe's is ignored with a message.

    Raises:
        ConfigError: the run cannot be a job.
    """
    if config.trainer.resume == "disable":
        raise ConfigError(
            "trainer.resume=disable is not supported with Slurm, because a requeued job would "
            "start over; choose another name=... instead"
        )
    address = config.cluster.address
    if address not in (None, "auto"):
        if any(word.lstrip("+").startswith("cluster.address=") for word in overrides):
            raise ConfigError(
                f"cluster.address={address} is not supported with Slurm, because the job starts "
                "its own Ray cluster; remove the key"
            )
        print(
            f"ignoring the recipe's cluster.address={address}: the job starts its own Ray cluster",
            file=sys.stderr,
        )
    return replace(config, cluster=replace(config.cluster, address=_HEAD))


def job_of(
    config: RunConfig,
    words: Sequence[str],
    options: Options,
    site: Site,
    *,
    kind: str = "train",
    name: str | None = None,
) -> Job:
    """Return the job of a run.

    Args:
        config: before `in_a_job`.
        words: what the job's driver runs (`launch.driver.command`).
        kind: the command of the run: `train`, `sft` or `train-reward`.
        name: of the run folder, if tasks of an array have different ones.
    """
    here = Path.cwd()
    folder = Path(derived.run_dir(config))
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = config.cluster.devices_per_node
    return Job(
        name=config.name,
        words=tuple(words),
        workdir=here,
        out=here / config.output_dir / "slurm",
        run_dir=here / (folder.with_name(name) if name else folder),
        nodes=options.nodes or nodes_of(config, kind),
        other_nodes=options.other_nodes,
        other_options=tuple(options.other_sbatch),
        spares=options.spares,
        gpus_per_node=site.gpus_per_node if gpus is None else gpus,
        time=options.time,
        array=options.array,
        dependency=options.dependency,
        max_restarts=options.max_restarts,
        grace_s=options.grace,
        options=tuple(options.sbatch),
    )
