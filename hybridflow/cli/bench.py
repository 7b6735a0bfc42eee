"""`hybridflow bench list | run | compare | baseline | report | archive`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from hybridflow.cli.command import add_actions, add_command
from hybridflow.errors import ConfigError

BENCH = """\
examples:
  hybridflow bench list                                   suites, and what each measures
  hybridflow bench run micro                              a suite, or one measurement by name
  hybridflow bench run gate tries=5                       settings of a measurement
  hybridflow bench compare runs/bench/A runs/bench/B      slower metrics in B; exit status 1 if any
  hybridflow bench baseline runs/bench/A runs/bench/B     store them as this hardware's baseline
  hybridflow bench compare runs/bench/C                   against that baseline
  hybridflow bench report runs/bench/*/ --format html --out page.html
  hybridflow bench archive runs/bench/A                   results, pages and logs in one file
  hybridflow slurm submit --bench preflight --nodes 16    on every node of a Slurm job

docs/benchmarking.md explains what each suite proves and what to do if it fails.
"""
FORMATS = ("table", "html", "prometheus", "json")
_RUNS = Path("runs/bench")


def add(commands: Any) -> None:
    """Add the command and its six actions to the parser."""
    actions = add_actions(
        commands, "bench", "benchmark suites for clusters, with baselines and a gate", BENCH
    )
    add_command(actions, "list", "list suites and their measurements", BENCH, run_list)
    run = add_command(actions, "run", "run a suite, or one measurement", BENCH, run_suite)
    run.add_argument(
        "what", metavar="SUITE", help="a suite, a measurement, or path/to/file.py:name"
    )
    run.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of a measurement")
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of this run (default: runs/bench/SUITE-TIME)",
    )
    run.add_argument("--node", default="", metavar="NAME", help="this node's name among --nodes")
    run.add_argument(
        "--nodes",
        nargs="+",
        metavar="NAME",
        help="all nodes that run this suite with the same output folder",
    )
    compare = add_command(
        actions, "compare", "compare a run with another, or with the baseline", BENCH, run_compare
    )
    compare.add_argument(
        "first",
        type=Path,
        metavar="A",
        help="the older run; without B, the run to compare with the baseline",
    )
    compare.add_argument("second", type=Path, nargs="?", metavar="B", help="the run to compare")
    compare.add_argument(
        "--bound", type=float, metavar="X", help="0.05 for 5%%, overriding the metrics' own bounds"
    )
    baseline = add_command(
        actions, "baseline", "store runs as the baseline of this hardware", BENCH, run_baseline
    )
    baseline.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    for parser in (compare, baseline):
        parser.add_argument(
            "--baselines",
            type=Path,
            default=_RUNS / "baselines",
            metavar="DIR",
            help="default: runs/bench/baselines",
        )
    report = add_command(
        actions,
        "report",
        "show a run, or the history of several, as a table or a page",
        BENCH,
        run_report,
    )
    report.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folders or files; a folder of runs means all of them",
    )
    report.add_argument("--format", choices=FORMATS, default="table")
    report.add_argument(
        "--strict",
        action="store_true",
        help="exit status 1 if a node is an outlier or a check fails",
    )
    archive = add_command(
        actions, "archive", "pack a run with its logs into one file", BENCH, run_archive
    )
    archive.add_argument("run", type=Path, metavar="RUN")
    for parser in (report, archive):
        parser.add_argument("--out", type=Path, metavar="FILE", help="output file")


def run_list(args: argparse.Namespace) -> int:
    """Run `hybridflow bench list`."""
    from hybridflow.bench.measurements.base import MEASUREMENTS, SUITES, comparisons

    entries = {name: MEASUREMENTS.get(name) for name in MEASUREMENTS.names()}
    for suite, about in SUITES.items():
        print(f"{suite}: {about}")
        for name, entry in entries.items():
            if suite in entry.suites:
                marks = ", on each node" * entry.per_node + ", needs a GPU" * entry.needs_gpu
                print(f"  {name:<12} {entry.summary}{marks}")
    if found := comparisons():
        print(f"not in a suite, run by name: {', '.join(found)} (docs/benchmarking.md)")
    return 0


def run_suite(args: argparse.Namespace) -> int:
    """Run `hybridflow bench run`. Returns exit status 1 if nothing could be measured."""
    from hybridflow.bench import files, show
    from hybridflow.bench import result as results
    from hybridflow.bench.page import page
    from hybridflow.bench.run import Job, run

    nodes = tuple(args.nodes or [args.node])
    if args.node not in nodes or len(set(nodes)) < len(nodes):
        raise ConfigError(
            f"--node must be one of --nodes, without duplicates; got --node {args.node!r} --nodes "
            f"{' '.join(nodes)}"
        )
    label = args.what.replace("/", "-").replace(".py:", "-")
    folder = args.out or _RUNS / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = Job(args.what, folder, args.node, nodes, tuple(args.settings))
    found = run(job, lambda line: print(line, flush=True))
    if len(nodes) == 1:
        results.write_text(folder / "report.html", page([found]))
        print(
            f"\n{show.table(found)}\n\nwritten: {folder / files.RESULT}, {folder / 'report.html'}"
        )
    return int(not found.metrics and bool(found.not_run))


def run_compare(args: argparse.Namespace) -> int:
    """Run `hybridflow bench compare`. Returns exit status 1 if a metric has become slower, 3 if the
    hardware differs."""
    from hybridflow.bench import files, show
    from hybridflow.bench.gate import compare
    from hybridflow.errors import DataError

    if args.bound is not None and not 0 < args.bound < 10:
        raise ConfigError(f"--bound must be a fraction such as 0.05 for 5%, got {args.bound:g}")
    if args.second is None:
        second = files.load(args.first)
        first = files.find_baseline(args.baselines, second)
    else:
        first, second = (files.pooled(files.load_all([path])) for path in (args.first, args.second))
    if first.suite != second.suite:
        raise DataError(
            f"A is a result of {first.suite}, but B is a result of {second.suite}; compare two "
            "results of the same suite"
        )
    found = compare(first, second, args.bound)
    print(show.compared(found))
    return found.exit_code


def run_baseline(args: argparse.Namespace) -> int:
    """Run `hybridflow bench baseline`."""
    from hybridflow.bench import files
    from hybridflow.bench import result as results
    from hybridflow.errors import DataError

    runs = files.load_all(args.runs)
    for other in runs[1:]:
        if words := results.differences(runs[0], other).get("hardware"):
            raise DataError(
                f"these runs are from different types of machines ({'; '.join(words)}); pass runs "
                "from a single type"
            )
    path = files.baseline_path(args.baselines, runs[-1])
    results.write(path, files.pooled(runs))
    print(f"{path}: {runs[-1].suite}, {len(runs)} run(s)")
    return 0


def run_report(args: argparse.Namespace) -> int:
    """Run `hybridflow bench report`."""
    import json

    from hybridflow.bench import files, page, show
    from hybridflow.bench import result as results
    from hybridflow.bench.gate import outliers

    runs = files.load_all(args.runs)
    last = runs[-1]
    if args.format == "json":
        text = json.dumps(results.as_dict(last), indent=1) + "\n"
    elif args.format == "html":
        text = page.page(runs)
    else:
        text = {"table": show.table, "prometheus": show.prometheus}[args.format](last)
    if args.out:
        results.write_text(args.out, text)
        print(args.out)
    else:
        print(text.rstrip("\n"))
    bad = bool(outliers(last)) or any(entry["level"] == "error" for entry in last.findings)
    return int(args.strict and bad)


def run_archive(args: argparse.Namespace) -> int:
    """Run `hybridflow bench archive`."""
    from hybridflow.bench import files

    if not args.run.is_dir():
        raise ConfigError(f"{args.run}: no such folder; pass one written by `hybridflow bench run`")
    print(
        files.archive(args.run, args.out or args.run.with_name(f"{args.run.resolve().name}.tar.gz"))
    )
    return 0
