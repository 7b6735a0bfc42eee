"""docs/faults.md: what was tried and what came of it, from the file of outcomes."""

from __future__ import annotations

import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.faults.campaign import Trial

HEAD = """\
# Disturbed runs

This page is written by `python -m tests.faults --table` from the outcomes of `python -m tests.faults`. A campaign is
one small run with greedy sampling on a two-core machine, which is disturbed in its start-up, in every step and at its
end, at moments drawn by a seed; whatever becomes of it, the same command is given until it has finished. A trial is one
disturbance. A campaign passes when metrics, samples and final weights are bit-identical to those of an undisturbed run,
each step is recorded once, no process, shared memory or temporary folder is left, no output has a traceback, and every
message names a remedy. A fault stays in the list below when it has been fixed since. Seconds run to the end of the next
whole step.

Seeds below 10 are not drawn (`tests/faults/free_hand.py`): two processes at once, processes that go on after 4 s,
shared memory and inodes used up, folders removed or made read-only, the driver killed again and again, and commands on
a finished run (`tests/faults/commands.py`). "Slurm, two nodes" is a job that Slurm starts again (`--slurm`). Seeds 0 to
5 and 214 were played twice, the second time after the two faults had been fixed, and then without a fault.

"Out of memory": the process gets eight more MiB, and the kernel kills it when it asks for more. "Disk stands still":
the file system of the run folder takes no write for eight seconds. A network that loses 1% of all frames, repeats 1%
and delays each by 1 to 3 ms changes no number of a run over two nodes (`tests/faults/test_network.py`). Jumps of the
clock are not tried: every wait follows the monotonic clock (`tests/arch/test_doors.py`).
"""


class Counted(Protocol):
    """What a table counts of a trial.

    Attributes:
        ended: whether the driver ended over it.
        seconds: until the next whole step was finished; -1: none came.
        faults: what was wrong.
    """

    ended: bool
    seconds: float
    faults: list[str]


def page(trials: Sequence[Trial]) -> str:
    """The document."""
    bad = [trial for trial in trials if trial.faults]
    lines = [
        HEAD,
        (
            f"{len(trials)} trials in {len({(t.shape, t.seed) for t in trials})} campaigns, "
            f"{len(bad)} with a fault."
        ),
        "",
    ]
    lines += section("Disturbance", trials, lambda trial: trial.kind)
    lines += section(
        "Disturbance and process", trials, lambda trial: f"{trial.kind}, {trial.victim}"
    )
    lines += section("Moment", trials, lambda trial: trial.moment.replace("_", " "))
    lines += section("Shape", trials, lambda trial: trial.shape)
    lines += found(
        [f"{t.shape}, seed {t.seed}: {t.title}: {t.faults[0].split(chr(58))[0]}" for t in bad]
    )
    return "\n".join(lines)


def section(
    title: str,
    trials: Sequence[Counted],
    key: Callable[[Any], str],
    went_on: str = "Went on in the same process",
) -> list[str]:
    """The lines of a table with a row for each value of `key`. `went_on` heads the trials that the
    driver survived."""
    groups = defaultdict(list)
    for trial in trials:
        groups[key(trial)].append(trial)
    lines = [
        f"## {title}",
        "",
        f"| | Trials | {went_on} | Median s to the next step | Faults |",
        "|---|---|---|---|---|",
    ]
    for name, group in sorted(groups.items()):
        took = [trial.seconds for trial in group if trial.seconds >= 0]
        median = f"{statistics.median(took):.1f}" if took else ""
        stayed = sum(not trial.ended for trial in group)
        bad = sum(bool(trial.faults) for trial in group)
        lines.append(f"| {name} | {len(group)} | {stayed} | {median} | {bad} |")
    return [*lines, ""]


def found(faults: Sequence[str]) -> list[str]:
    """The lines of the list of faults; none where there is none."""
    if not faults:
        return []
    return [
        "## Faults found",
        "",
        *(textwrap.fill(f"- {one}", 118, subsequent_indent="  ") for one in faults),
        "",
    ]
