"""`hybridflow track`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridflow.cli.command import add_command, say
from hybridflow.errors import ConfigError

TRACK = """\
examples:
  hybridflow track runs/mine --to wandb                           the records that wandb lacks
  MLFLOW_TRACKING_URI=http://host:5000 hybridflow track runs/mine --to mlflow

Sends the metrics, samples and report that the tracker does not have yet, because the run did not
use the tracker, was offline, or lost records.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    about = "send a run folder to a tracker"
    parser = add_command(commands, "track", about, TRACK, run_track)
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="a run folder, for example runs/tiny-moe-grpo"
    )
    parser.add_argument(
        "--to", required=True, metavar="TRACKER", help="wandb, mlflow, trackio or FILE.py:NAME"
    )


def run_track(args: argparse.Namespace) -> int:
    """Run `hybridflow track`."""
    from hybridflow.config.entries import TRACKERS
    from hybridflow.observe.report import REPORT_NAME
    from hybridflow.observe.trackers.base import CatchesUp, ShowsRollouts
    from hybridflow.process.extras import require

    run_dir: Path = args.run_dir
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run_dir / 'metrics.jsonl'}: no such file; pass the folder of a run whose "
            "trainer.loggers include jsonl"
        )
    entry = TRACKERS.get(args.to)
    if entry.library:
        require(entry.library)
    sink = entry.make(run_dir)
    if not isinstance(sink, CatchesUp):
        raise ConfigError(
            f"--to {args.to}: this tracker only follows a running job; choose wandb, mlflow or "
            "trackio, or add a catch_up method to your own (hybridflow/observe/trackers/base.py)"
        )
    sent = sum(1 for _ in sink.catch_up())
    report = run_dir / REPORT_NAME
    if report.is_file() and isinstance(sink, ShowsRollouts):
        sink.report(report)
    sink.close()
    say(f"{sent} records of {run_dir} sent to {args.to}")
    return 0
