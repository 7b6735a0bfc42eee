"""Submission of a run as a Slurm job: the submission options, and the job built from them and the
run's configuration."""

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
    """The options of `hybridflow slurm submit`, using the same names.

    Attributes:
        nodes: number of nodes; None for as many as the run's cluster and engines need.
        other_nodes: number of these nodes in the second part of a heterogeneous job, which uses the
            sbatch options `other_sbatch`.
        spares: number of spare nodes, used to replace bad ones.
        grace: seconds for writing a checkpoint before the job ends.
        site: path of the site file; None for the one given by $HYBRIDFLOW_SITE.
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
    """Return the configuration that the job will use, with a placeholder for the address of the Ray
    head.

    Args:
        overrides: the user's settings (`key=value`). A `cluster.address` among them is rejected;
            one set by the recipe is ignored with a message.

    Raises:
        ConfigError: the run cannot be submitted as a job.
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
    """Build the Slurm job for a run.

    Args:
        config: the run's configuration, before `in_a_job`.
        words: the driver's command (`launch.driver.command`).
        kind: subcommand of the run: `train`, `sft` or `train-reward`.
        name: name of the run folder, if each task of an array uses a different one.
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
