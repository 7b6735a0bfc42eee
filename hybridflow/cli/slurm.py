"""`hybridflow slurm submit | render | status | logs | cancel`."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_actions, add_command, add_recipe, say_error, warn
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.launch.job import Job
    from hybridflow.launch.site import Site
    from hybridflow.launch.submission import Options

SLURM = """\
examples:
  hybridflow slurm submit --config-name tiny-moe-grpo cluster.nodes=2 cluster.procs_per_node=2
  hybridflow slurm render --config-name tiny-moe-grpo > job.sbatch    the sbatch file, to edit
  hybridflow slurm submit --config-name NAME --spares 1 --max-restarts 5 --sbatch=--constraint=h200
  hybridflow slurm submit --config-name NAME --array 1-3 seed=%a name=sweep-%a
  hybridflow slurm submit --bench preflight --nodes 16                all nodes; names slow ones
  hybridflow slurm status 1234
  hybridflow slurm logs 1234 --follow
  hybridflow slurm cancel 1234

A job that is preempted or reaches its time limit writes a checkpoint, is requeued, and continues
from there. Site defaults are read from --site or $HYBRIDFLOW_SITE (launch/slurm/site.yaml lists all
keys). See docs/cluster.md.
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
        ("status", "print a job's state and the outcome of its starts", run_status),
        ("logs", "print the logs of all nodes and starts of a job", run_logs),
        ("cancel", "cancel jobs", run_cancel),
    ):
        parser = add_command(actions, name, summary, SLURM, handler)
        parser.add_argument(
            "jobs", nargs="+" if name == "cancel" else 1, metavar="JOB", help="Slurm job id"
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
    add_recipe(parser, "name of a recipe")
    add("--bench", metavar="SUITE", help="a suite of `hybridflow bench`, instead of a recipe")
    add(
        "--drain",
        action="store_true",
        help="with --bench: drain the outlier nodes (requires Slurm operator privileges)",
    )
    add("--job", choices=("train", "sft", "train-reward"), default="train", help="default: train")
    add(
        "--nodes", type=int, metavar="N", help="default: as many as the recipe and its engines need"
    )
    add(
        "--other-nodes",
        type=int,
        default=0,
        metavar="M",
        help="how many of the N nodes form the second component of a heterogeneous job",
    )
    add(
        "--other-sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="sbatch option for the second component",
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
    add("--array", metavar="SPEC", help="a job array; %%a in settings stands for the task's number")
    add("--dependency", metavar="SPEC", help="in sbatch's format")
    add(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="restarts after failures (default: 3)",
    )
    add(
        "--grace",
        type=int,
        default=180,
        metavar="S",
        help="seconds before the time limit to write a final checkpoint (default: 180)",
    )
    add("--site", type=Path, metavar="FILE", help="the site file (default: $HYBRIDFLOW_SITE)")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="additional sbatch option, for example --sbatch=--nice=10",
    )


def run_submit(args: argparse.Namespace) -> int:
    """Run `hybridflow slurm submit`."""
    from hybridflow.launch import slurm
    from hybridflow.launch.job import render

    job, site = _job(args)
    number = slurm.submit(job, render(job, site))
    print(slurm.submitted(job, number, site))
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
    """Return the job described by the options. Its recipe is checked in the same way as for
    `train`."""
    if args.bench:
        return _bench_job(args)
    if args.config_name is None:
        raise ConfigError(
            "--config-name is missing; pass a recipe (`hybridflow train` lists them), or --bench "
            "SUITE"
        )
    if args.drain:
        raise ConfigError("--drain requires --bench SUITE: its report selects the nodes to drain")
    from hybridflow.config.check import check
    from hybridflow.config.hub import located
    from hybridflow.config.load import load_config
    from hybridflow.launch.submission import in_a_job, job_of
    from hybridflow.models.check import check as check_models

    # Replace %a by the first array task's number, so that the recipe is checked as that task does.
    overrides = [word.replace("%a", "1") for word in args.overrides]
    run = load_config(args.config_name, overrides, args.config_dir)
    if run.cluster.in_process:
        raise ConfigError(
            f"{args.config_name} runs in one process (cluster.in_process=true), without Ray; "
            f"submit it with sbatch --wrap='hybridflow {args.job} --config-name "
            f"{args.config_name}', or add cluster=one-process"
        )
    checked = located(in_a_job(run, overrides))
    check(checked, args.job)
    check_models(checked, args.job)
    warn(checked)
    # a login node may lack torch; the job checks the flow again
    if args.job == "train" and importlib.util.find_spec("torch"):
        from hybridflow.trainer.flow_check import check_flow

        check_flow(checked, say_error)
    options = _options(args)
    site = options.read_site()
    words = [args.job, "--config-name", args.config_name]
    words += ["--config-dir", str(args.config_dir.resolve())] if args.config_dir else []
    names = [word.partition("=")[2] for word in args.overrides if word.startswith("name=")]
    per_task = [name for name in names if "%a" in name]
    name = per_task[-1] if args.array and per_task else None
    words += args.overrides
    return job_of(run, words, options, site, kind=args.job, name=name), site


def _options(args: argparse.Namespace) -> Options:
    from dataclasses import fields

    from hybridflow.launch.submission import Options

    return Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


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
        raise ConfigError(f"--bench {args.bench} does not run a recipe; remove {', '.join(given)}")
    chosen(args.bench)
    site = _options(args).read_site()
    here = Path.cwd()
    out = here / "runs" / "bench" / "slurm"
    job = Job(
        name="bench-" + re.sub(r"[^\w]|_", "-", args.bench),
        words=("bench", "run", args.bench),
        workdir=here,
        out=out,
        run_dir=out,
        nodes=args.nodes or 1,
        gpus_per_node=site.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node,
        time=args.time or site.time or "00:20:00",
        dependency=args.dependency,
        options=tuple(args.sbatch),
        drain=args.drain,
        body="bench.sh",
    )
    return job, site
