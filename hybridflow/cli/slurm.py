"""`hybridflow slurm submit | render | status | logs | cancel`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_actions, add_command, add_recipe, warn
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.launch.job import Job
    from hybridflow.launch.site import Site

SLURM = """\
examples:
  hybridflow slurm submit --config-name tiny-moe-grpo cluster.nodes=2 cluster.procs_per_node=2
  hybridflow slurm render --config-name tiny-moe-grpo > job.sbatch    the same file, to read or edit
  hybridflow slurm submit --config-name NAME --spares 1 --max-restarts 5 --sbatch=--constraint=h200
  hybridflow slurm submit --config-name NAME --array 1-3 seed=%a name=sweep-%a
  hybridflow slurm submit --bench preflight --nodes 16                all nodes; names slow ones
  hybridflow slurm status 1234
  hybridflow slurm logs 1234 --follow
  hybridflow slurm cancel 1234

A job whose time runs out or that is preempted writes a checkpoint, is requeued, and goes on from
there. A site's defaults are in the file of --site or $HYBRIDFLOW_SITE (launch/slurm/site.yaml shows
every key). docs/cluster.md
"""


def add(commands: Any) -> None:
    """Add the command and its five actions to the parser."""
    actions = add_actions(commands, "slurm", "submit and manage Slurm jobs", SLURM)
    submit = add_command(
        actions, "submit", "submit a job that starts Ray on its nodes and trains", SLURM, run_submit
    )
    render = add_command(
        actions, "render", "print the sbatch file that submit would use", SLURM, run_render
    )
    for parser in (submit, render):
        _add_job_options(parser)
    for name, summary, handler in (
        ("status", "a job's state, and the outcome of its starts", run_status),
        ("logs", "the logs of all nodes and starts of a job", run_logs),
        ("cancel", "cancel jobs", run_cancel),
    ):
        parser = add_command(actions, name, summary, SLURM, handler)
        parser.add_argument(
            "jobs", nargs="+" if name == "cancel" else 1, metavar="JOB", help="Slurm's job number"
        )
        if name != "cancel":
            parser.add_argument(
                "--output-dir", type=Path, default=Path("runs"), metavar="DIR", help="default: runs"
            )
        if name == "logs":
            parser.add_argument(
                "--follow",
                action="store_true",
                help="follow the job's output until it ends",
            )


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser, "a recipe")
    add("--bench", metavar="SUITE", help="a suite of `hybridflow bench`, instead of a recipe")
    add("--job", choices=("train", "sft", "train-reward"), default="train", help="default: train")
    add(
        "--nodes", type=int, metavar="N", help="default: what the recipe's cluster and engines need"
    )
    add(
        "--other-nodes",
        type=int,
        default=0,
        metavar="M",
        help="of the N, as the second part of a heterogeneous job",
    )
    add(
        "--other-sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="option of the second part's nodes",
    )
    add(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="spare nodes that replace bad ones",
    )
    add("--gpus-per-node", type=int, metavar="N")
    add("--partition", metavar="NAME")
    add("--account", metavar="NAME")
    add("--time", metavar="TIME", help="time limit, in sbatch's format")
    add("--array", metavar="SPEC", help="a job array; %%a in settings is the task's number")
    add("--dependency", metavar="SPEC", help="in sbatch's format")
    add("--max-restarts", type=int, default=3, metavar="N", help="after failures (default: 3)")
    add(
        "--grace",
        type=int,
        default=180,
        metavar="S",
        help="seconds for a checkpoint before the end (default: 180)",
    )
    add("--site", type=Path, metavar="FILE", help="the site file (default: $HYBRIDFLOW_SITE)")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further option, as --sbatch=--nice=10",
    )


def run_submit(args: argparse.Namespace) -> int:
    """Run `hybridflow slurm submit`."""
    from hybridflow.launch import slurm
    from hybridflow.launch.job import render

    job, site = _job(args)
    number = slurm.submit(job, render(job, site))
    spares = f" and {job.spares} spare" if job.spares else ""
    print(f"submitted job {number}: {job.name} on {job.nodes} node(s){spares}")
    print(f"output: {job.out / f'{number}.out'}")
    print(
        f"hybridflow slurm status {number}; hybridflow slurm logs {number} --follow; hybridflow "
        f"slurm cancel {number}"
    )
    return 0


def run_render(args: argparse.Namespace) -> int:
    """Run `hybridflow slurm render`."""
    from hybridflow.launch.job import render

    print(render(*_job(args)), end="")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Run `hybridflow slurm status`."""
    from hybridflow.launch import slurm

    print(slurm.status(args.jobs[0], args.output_dir / "slurm"))
    return 0


def run_logs(args: argparse.Namespace) -> int:
    """Run `hybridflow slurm logs`."""
    from hybridflow.launch import slurm

    job = args.jobs[0]
    out = args.output_dir / "slurm"
    if args.follow:
        for text in slurm.follow(job, out):
            print(text, end="", flush=True)
    else:
        print(slurm.joined(slurm.log_files(job, out)))
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Run `hybridflow slurm cancel`."""
    from hybridflow.launch import slurm

    slurm.cancel(args.jobs)
    return 0


def _job(args: argparse.Namespace) -> tuple[Job, Site]:
    """Return the job that the options describe, with its recipe checked as for `train`."""
    if args.bench:
        return _bench_job(args)
    if args.config_name is None:
        raise ConfigError(
            "--config-name is missing: name a recipe (`hybridflow train` lists them), or --bench "
            "SUITE"
        )
    from hybridflow.config import derived
    from hybridflow.config.check import check
    from hybridflow.config.hub import located
    from hybridflow.config.load import load_config
    from hybridflow.launch.job import Job, nodes_of

    # The array task's number replaces %a, so that the recipe is checked as the first task reads it.
    overrides = [word.replace("%a", "1") for word in args.overrides]
    run = load_config(args.config_name, overrides, args.config_dir)
    if run.cluster.in_process:
        raise ConfigError(
            f"{args.config_name} runs in one process (cluster.in_process=true), without Ray: give "
            f"it to sbatch itself, as in sbatch --wrap='hybridflow {args.job} --config-name "
            f"{args.config_name}', or add cluster=one-process"
        )
    _check_address(run.cluster.address, overrides)
    # the job's own head overrides the recipe's group (`launch.driver.run`)
    joined = [*overrides, "cluster.address='127.0.0.1:1'"]
    checked = located(load_config(args.config_name, joined, args.config_dir))
    check(checked, args.job)
    warn(checked)
    if run.trainer.resume == "disable":
        raise ConfigError(
            "trainer.resume=disable: a requeued job would start over; choose another name=... "
            "instead"
        )
    site = _site(args)
    words = [args.job, "--config-name", args.config_name]
    words += ["--config-dir", str(args.config_dir.resolve())] if args.config_dir else []
    here = Path.cwd()
    per_task = []
    for word in args.overrides:
        if word.startswith("name=") and "%a" in word:
            per_task.append(word.partition("=")[2])
    folder = Path(derived.run_dir(run))
    folder = folder.with_name(per_task[-1]) if args.array and per_task else folder
    gpus = args.gpus_per_node
    if gpus is None:
        gpus = (
            site.gpus_per_node
            if run.cluster.devices_per_node is None
            else run.cluster.devices_per_node
        )
    job = Job(
        name=run.name,
        words=(*words, *args.overrides),
        workdir=here,
        out=here / run.output_dir / "slurm",
        run_dir=here / folder,
        nodes=args.nodes or nodes_of(run, args.job),
        other_nodes=args.other_nodes,
        other_options=tuple(args.other_sbatch),
        spares=args.spares,
        gpus_per_node=gpus,
        time=args.time,
        array=args.array,
        dependency=args.dependency,
        max_restarts=args.max_restarts,
        grace_s=args.grace,
        options=tuple(args.sbatch),
    )
    return job, site


def _check_address(address: str | None, overrides: Sequence[str]) -> None:
    """Raise ConfigError if the user sets a cluster address for a job, which starts its own cluster.
    If the recipe sets one, print a line."""
    if address in (None, "auto"):
        return
    if any(word.lstrip("+").startswith("cluster.address=") for word in overrides):
        raise ConfigError(
            f"cluster.address={address}: a Slurm job starts its own Ray cluster; leave the key out"
        )
    print(
        f"cluster.address={address} of the recipe is not used: the job starts its own Ray cluster",
        file=sys.stderr,
    )


def _site(args: argparse.Namespace) -> Site:
    """Return the site file's defaults, overridden by the options."""
    from dataclasses import replace

    from hybridflow.launch.site import read_site

    site = read_site(args.site)
    return replace(
        site, partition=args.partition or site.partition, account=args.account or site.account
    )


def _bench_job(args: argparse.Namespace) -> tuple[Job, Site]:
    """Return a job that runs a benchmark suite on each of its nodes, without Ray."""
    from hybridflow.bench.measurements.base import chosen
    from hybridflow.launch.job import Job

    refused = {
        "--config-name": args.config_name,
        "--spares": args.spares,
        "--other-nodes": args.other_nodes,
        "--array": args.array,
        "settings": args.overrides,
    }
    if given := [name for name, value in refused.items() if value]:
        raise ConfigError(f"--bench {args.bench} runs no recipe; leave out {', '.join(given)}")
    chosen(args.bench)
    site = _site(args)
    here = Path.cwd()
    out = here / "runs" / "bench" / "slurm"
    job = Job(
        name="bench-" + "".join(letter if letter.isalnum() else "-" for letter in args.bench),
        words=("bench", "run", args.bench),
        workdir=here,
        out=out,
        run_dir=out,
        nodes=args.nodes or 1,
        gpus_per_node=site.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node,
        time=args.time or site.time or "00:20:00",
        dependency=args.dependency,
        options=tuple(args.sbatch),
        body="bench.sh",
    )
    return job, site
