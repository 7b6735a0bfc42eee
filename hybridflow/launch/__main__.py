"""`python -m hybridflow.launch STEP`: the job steps that `launch/slurm/job.sh` and
`launch/ray/cluster.sh` run.

Each step imports only the modules that it needs, because all nodes start at the same time, usually
from a shared filesystem.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridFlowError
from hybridflow.launch import records

_MOST_LINES = 100_000  # of the output of all preflight steps


class _Parser(argparse.ArgumentParser):
    """An argument parser that does not accept abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)


def main(words: list[str]) -> int:
    """Run one step and return its exit status."""
    args = _parser().parse_args(words)
    try:
        return int(args.handler(args))
    except HybridFlowError as error:
        # the launcher reads the path of a private folder from stdout
        stream = sys.stderr if args.step == "private-folder" else sys.stdout
        print(f"hybridflow: {error}", file=stream, flush=True)
        if hasattr(args, "dir"):  # the verdict repeats it
            (args.dir / f"{args.step}-error").write_text(str(error), encoding="utf-8")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m hybridflow.launch", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)  # of the same class

    check = steps.add_parser("preflight", help="check this node and its connections to the others")
    check.add_argument("--min-open-files", type=int, default=4096)
    check.add_argument("--interface")
    check.add_argument("--timeout", type=float, default=60.0)
    check.set_defaults(handler=_preflight)

    choose = steps.add_parser("judge", help="choose the nodes to use from all preflight records")
    choose.add_argument("--nodes", type=int, required=True)
    choose.add_argument("--max-clock-skew", type=float, default=2.0)
    choose.add_argument(
        "--bad-nodes", type=Path, help="file to which the excluded nodes are written"
    )
    choose.set_defaults(handler=_judge)

    ray = steps.add_parser("node", help="run Ray on this node")
    ray.add_argument("--object-store-gib", type=float)
    ray.set_defaults(handler=_node)

    drive = steps.add_parser("driver", help="wait for all nodes, then run `hybridflow WORDS`")
    drive.add_argument("--nodes", type=int, required=True)
    drive.add_argument("--grace", type=float, default=120.0)
    drive.add_argument("words", nargs="+")
    drive.set_defaults(handler=_driver)

    for step in (check, choose, ray, drive):
        step.add_argument(
            "--dir", type=Path, required=True, help="folder for this start of the job"
        )
    for step in (check, choose):
        step.add_argument(
            "--hosts", required=True, help="all nodes of the allocation, separated by spaces"
        )

    health = steps.add_parser(
        "health", help="for a prolog: exit with status 1 if this node has a problem"
    )
    health.set_defaults(handler=_health)
    for step in (check, ray, health):
        step.add_argument("--gpus", type=int, default=0)
    for step in (check, health):
        step.add_argument("--min-free-gib", type=float, default=5.0)
        step.add_argument("--min-shm-gib", type=float, default=1.0)
    for step in (ray, drive):
        step.add_argument("--start-timeout", type=float, default=300.0)

    private = steps.add_parser(
        "private-folder", help="create a folder for `ray start --temp-dir` and print its path"
    )
    private.add_argument("--prefix", required=True, help="prefix of the private parent folder")
    private.set_defaults(handler=_private_folder)

    end = steps.add_parser(
        "verdict", help="print why the job ended; exit status 75 requests a requeue"
    )
    end.add_argument("--job-dir", type=Path, required=True)
    end.add_argument("--restart", type=int, required=True)
    end.add_argument("--max-restarts", type=int, required=True)
    end.add_argument("--run-dir", type=Path, required=True)
    end.add_argument("--state", default="UNKNOWN")
    end.add_argument("--asked", type=int, default=0)
    end.add_argument("--driver-status", default="none")
    end.add_argument("--why", default="")
    end.set_defaults(handler=_verdict)
    return parser


def _preflight(args: argparse.Namespace) -> int:
    from hybridflow.launch import preflight

    wanted = preflight.Wanted(
        args.gpus, args.min_free_gib, args.min_shm_gib, args.min_open_files, args.interface
    )
    hosts = args.hosts.split()
    record = preflight.check_node(_node_name(), hosts, args.dir, wanted, args.timeout)
    preflight.print_record(record)
    return 0


def _health(args: argparse.Namespace) -> int:
    from hybridflow.launch import preflight

    wanted = preflight.Wanted(args.gpus, args.min_free_gib, args.min_shm_gib)
    problems = preflight.problems_here(Path(tempfile.gettempdir()), wanted)
    print("; ".join(problems) or "no problems found", flush=True)
    return int(bool(problems))


def _judge(args: argparse.Namespace) -> int:
    from hybridflow.launch import preflight

    said = records.tail(args.dir / "preflight.out", _MOST_LINES)
    errors = records.tail(args.dir / "preflight.err", _MOST_LINES)
    found = preflight.parse(said)
    hosts = args.hosts.split()
    _, bad = preflight.usable(hosts, found, args.max_clock_skew, errors)
    for host, why in bad.items():
        print(f"hybridflow: excluding {host}: {why}", flush=True)
    if args.bad_nodes is not None and bad:
        from hybridflow.launch import bad_nodes

        job = os.environ.get("SLURM_JOB_ID", "")
        trouble = bad_nodes.remember(args.bad_nodes, bad, job)
        if trouble:
            print(f"hybridflow: {trouble}", flush=True)
    chosen = preflight.choose(hosts, found, args.nodes, args.max_clock_skew, errors)
    use = [{"node": record.node, "address": record.address} for record in chosen]
    records.write(args.dir / records.CHOSEN, {"use": use})
    lines = "".join(f"{record.node}\n" for record in chosen)
    (args.dir / "nodes.txt").write_text(lines)
    return 0


def _node(args: argparse.Namespace) -> int:
    sys.stdout.flush()
    # srun's %N would be the name of the host, not of the node
    name = _node_name()
    path = args.dir / records.NODE_LOG.format(name)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from hybridflow.launch import node

    options = node.RayOptions(args.gpus, args.object_store_gib, args.start_timeout)
    job = int(os.environ["SLURM_JOB_ID"])
    return node.run(name, args.dir, options, job)


def _driver(args: argparse.Namespace) -> int:
    from hybridflow.launch import driver

    return driver.run(args.dir, args.nodes, args.words, args.start_timeout, args.grace)


def _private_folder(args: argparse.Namespace) -> int:
    from hybridflow.process.private_folder import RAY, ROOM_FOR_RAY, make_private_folder

    folder = make_private_folder(args.prefix, ROOM_FOR_RAY)
    print(folder / RAY)
    return 0


def _verdict(args: argparse.Namespace) -> int:
    from hybridflow.launch import verdict

    status = None if args.driver_status == "none" else int(args.driver_status)
    folder = args.job_dir / f"restart-{args.restart}"
    why = args.why
    for step in ("judge", "driver"):
        path = folder / f"{step}-error"
        if path.exists():
            message = path.read_text(encoding="utf-8")
            why = " ".join(message.split())
    attempt, log_tail, code = verdict.judge(
        args.job_dir,
        args.restart,
        args.max_restarts,
        args.run_dir,
        status,
        asked=bool(args.asked),
        state=args.state,
        why=why,
    )
    if log_tail:
        print(log_tail)
    place = f"job {args.job_dir.name}, start {args.restart}"
    print(f"hybridflow: {place}, {attempt.outcome}: {attempt.why}", flush=True)
    return code


def _node_name() -> str:
    return os.environ["SLURMD_NODENAME"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
