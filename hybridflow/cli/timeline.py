"""`hybridflow timeline`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_command, say
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.observe.joined_timeline import JoinedTimeline, Process, Span

TIMELINE = """\
examples:
  hybridflow timeline runs/tiny-moe-grpo               all steps
  hybridflow timeline runs/tiny-moe-grpo --steps 3     one step
  hybridflow timeline runs/tiny-moe-grpo --steps 3-5 --out step.perfetto

The trace opens in https://ui.perfetto.dev, which reads it in the browser without uploading it. It
contains the driver's phases, every call of every rank and engine worker, checkpoints written in the
background, requests in flight at each engine and pending reward calls, all on the driver's clock.
"""
_MOST_ROWS = 40
_NAMES = 4


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands, "timeline", "join the timelines of all processes of a run", TIMELINE, run_timeline
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="a run folder, for example runs/tiny-moe-grpo"
    )
    parser.add_argument("--steps", metavar="N[-M]", help="only these steps (default: all)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the trace (default: RUN_DIR/timeline.perfetto)"
    )


def run_timeline(args: argparse.Namespace) -> int:
    """Run `hybridflow timeline`."""
    from hybridflow.observe.joined_timeline import join
    from hybridflow.observe.perfetto_trace import write_trace
    from hybridflow.process.extras import require

    require("perfetto")
    found = join(args.run_dir)
    start, end = _interval(found, args.steps)
    chosen = found.between(start, end)
    out: Path = args.out or args.run_dir / "timeline.perfetto"
    slices = write_trace(chosen, out)
    rows = [_row(one, start, end) for one in chosen.processes]
    for line in rows[:_MOST_ROWS]:
        say(line)
    if len(rows) > _MOST_ROWS:
        say(f"and {len(rows) - _MOST_ROWS} more processes")
    for line in chosen.missing:
        say(f"note: {line}")
    say(
        f"{slices} spans of {len(rows)} processes written to {out}; open it in "
        "https://ui.perfetto.dev"
    )
    return 0


def _interval(timeline: JoinedTimeline, steps: str | None) -> tuple[float, float]:
    """Return the time interval that covers the steps, or the whole timeline if `steps` is None."""
    if steps is None:
        every: list[Span] = []
        for one in timeline.processes:
            every += chain.from_iterable(one.threads.values())
        if not every:
            raise ConfigError("timeline.jsonl contains no finished phase yet")
        return _covering(every)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    if match is None:
        raise ConfigError(f"--steps {steps}: expected a number or a range, for example 3 or 3-5")
    first = int(match[1])
    last = int(match[2] or first)
    known = timeline.steps()
    inside = [span for step, span in known.items() if first <= step <= last]
    if not inside:
        there = f"{min(known)} to {max(known)}" if known else "none"
        raise ConfigError(f"--steps {steps}: no such step (finished steps: {there})")
    return _covering(inside)


def _covering(spans: Sequence[Span]) -> tuple[float, float]:
    return min(span.start for span in spans), max(span.end for span in spans)


def _row(process: Process, start: float, end: float) -> str:
    """Describe how busy a process was, and how its time was divided between calls."""
    from hybridflow.observe.joined_timeline import DRIVER, WHOLE_STEP, busy_seconds

    spans = [span for span in process.threads.get("main", []) if span.name != WHOLE_STEP]
    seconds: dict[str, float] = {}
    for span in spans:
        inside = min(span.end, end) - max(span.start, start)
        seconds[span.name] = seconds.get(span.name, 0.0) + max(inside, 0.0)
    longest = sorted(seconds, key=lambda name: -seconds[name])[:_NAMES]
    share = busy_seconds(spans, start, end) / max(end - start, 1e-9)
    what = ", ".join(f"{name} {seconds[name]:.2f} s" for name in longest)
    label = "in phases" if process.name == DRIVER else "busy"
    error = f" (clock within {process.clock_error * 1e3:.1f} ms)" if process.clock_error else ""
    return f"{process.name:20} {share:4.0%} {label:9} {what}{error}"
