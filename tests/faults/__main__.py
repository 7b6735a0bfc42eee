"""`python -m tests.faults`: play campaigns, or write the table of their outcomes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.process.stopping import terminate_as_interrupt
from tests.e2e.runs import Run
from tests.faults import commands, limits, oracle, slurm_jobs, table
from tests.faults.campaign import Campaign, Trial, durations, moments_path
from tests.faults.faults import COVERING, Fault, draw, two_kills
from tests.faults.free_hand import CAMPAIGNS
from tests.faults.shapes import FLOWS, SHAPES, words_of

ROOT = Path(__file__).resolve().parents[2]
_INSIDE = "HYBRIDFLOW_FAULTS_NAMESPACE"


def main() -> int:
    """Exit status 1 when a campaign had a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--campaigns", type=int, default=0, help="how many to play")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first; each next one has the next seed"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="of all campaigns; default: the shapes in turn"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "faults", help="for references and outcomes"
    )
    parser.add_argument(
        "--outcomes",
        type=Path,
        help="file that a line is added to for each trial, and that the table "
        "is made of; default: trials.jsonl in the folder",
    )
    parser.add_argument(
        "--cover", action="store_true", help="play the covering campaign of `make test-full`"
    )
    parser.add_argument(
        "--two-kills",
        action="store_true",
        help="kill a rank and the driver, once each, in a run of the shape (or of each built-in "
        "flow), at moments of the seed",
    )
    parser.add_argument(
        "--free-hand",
        action="store_true",
        help="play the campaigns of free_hand.py, which no seed draws; their trials have the seeds "
        "0, 1, ...",
    )
    parser.add_argument(
        "--slurm",
        type=int,
        default=0,
        metavar="N",
        help="kill the processes of so many jobs of a Slurm of our own; they have the seeds from "
        "--seed on",
    )
    parser.add_argument("--table", action="store_true", help="write docs/faults.md")
    args = parser.parse_args()
    outcomes = args.outcomes or args.folder / "trials.jsonl"
    if args.table:
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        (ROOT / "docs" / "faults.md").write_text(
            table.page([Trial(**json.loads(line)) for line in lines])
        )
        return 0
    if args.slurm:
        with tempfile.TemporaryDirectory(prefix="hybridflow-faults-", dir="/tmp") as name:
            trials = slurm_jobs.play(range(args.seed, args.seed + args.slurm), Path(name))
        _add(outcomes, trials)
        return shown(trials)
    if _INSIDE not in os.environ:
        return _in_own_namespace()
    disks = os.environ[_INSIDE] == "1"
    if args.cover:
        return shown(play("one process", 0, args.folder, COVERING))
    if args.two_kills:
        shapes = [args.shape] if args.shape else list(FLOWS.values())
        return max(
            shown(play(shape, args.seed, args.folder, two_kills(shape, args.seed)))
            for shape in shapes
        )
    todo: list[tuple[str, int, Sequence[Fault]]] = []
    if args.free_hand:
        if not disks:
            parser.error("--free-hand needs file systems of its own: run it as root")
        todo = [(shape, seed, faults) for seed, (shape, faults) in enumerate(CAMPAIGNS)]
    for number in range(args.seed, args.seed + args.campaigns):
        shape = args.shape or list(SHAPES)[number % len(SHAPES)]
        todo.append((shape, number, draw(shape, number, disks, limits.can_starve())))
    status = 0
    for shape, seed, faults in todo:
        trials = play(shape, seed, args.folder, faults)
        _add(outcomes, trials)
        status |= shown(trials)
    if args.free_hand:
        finished = undisturbed("one process", args.folder) / "out" / "e2e"
        with tempfile.TemporaryDirectory(prefix="hybridflow-faults-", dir="/tmp") as name:
            trials = commands.play(finished, Path(name), seed=len(CAMPAIGNS))
        _add(outcomes, trials)
        status |= shown(trials)
    return status


def _add(outcomes: Path, trials: Sequence[Trial]) -> None:
    """Add a line for each trial."""
    with outcomes.open("a") as file:
        file.writelines(json.dumps(trial.__dict__) + "\n" for trial in trials)


def shown(trials: Sequence[Trial]) -> int:
    """Print a line for each; exit status 1 when one had a fault."""
    for trial in trials:
        verdict = "; ".join(trial.faults) or "ok"
        who = f"{trial.shape}, seed {trial.seed}: {trial.title} [{trial.victim}]"
        print(f"{who} {trial.seconds:.1f} s: {verdict}", flush=True)
    return int(any(trial.faults for trial in trials))


def play(shape: str, seed: int, folder: Path, todo: Sequence[Fault]) -> list[Trial]:
    """One campaign, with the comparison at its end."""
    reference = undisturbed(shape, folder)
    with tempfile.TemporaryDirectory(prefix="hybridflow-faults-", dir="/tmp") as name:
        out = Path(name) / "out"
        out.mkdir()
        words = words_of(shape, folder / "work", out)
        disks = os.environ[_INSIDE] == "1"
        if disks:
            limits.make_disk(Path(name) / "disk", out)
        campaign = Campaign(
            shape, seed, words, out / "e2e", durations(reference / "moments"), Path(name) / "output"
        )
        try:
            trials = campaign.play(todo)
            trials[-1].faults += oracle.differences(out / "e2e", reference / "out" / "e2e")
            if any(trial.faults for trial in trials):
                shutil.copytree(
                    name, folder / f"{shape}-{seed}".replace(" ", "-"), dirs_exist_ok=True
                )
        finally:
            if disks:
                limits.thaw(out)
                subprocess.run(["umount", "-l", str(out)], check=True)
            limits.free_groups()
    return trials


def undisturbed(shape: str, folder: Path) -> Path:
    """The folder of a run of the shape that nobody disturbed; it is made once."""
    at = folder / "undisturbed" / shape.replace(" ", "-").replace(",", "")
    if not (at / "moments.done").exists():
        shutil.rmtree(at, ignore_errors=True)
        (at / "out").mkdir(parents=True)
        began = time.monotonic()
        with Run(at / "output", *words_of(shape, folder / "work", at / "out")) as run:
            assert run.end(600) == 0, run.out + run.err
        assert moments_path(at / "out" / "e2e").stat().st_size, "the run announced no moment"
        (at / "moments.done").write_text(f"{time.monotonic() - began:.1f} s\n")
    return at


def _in_own_namespace() -> int:
    """Run again with mounts and shared memory of its own, where this is allowed; elsewhere without
    disturbed disks."""
    script = 'mount -t tmpfs -o size=4g faults /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "tests.faults", *sys.argv[1:]]
    disks = str(int(limits.can_make_disks()))
    if (
        subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode
        == 0
    ):
        wrapped = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            script,
            "sh",
            *command,
        ]
        return subprocess.run(wrapped, env={**os.environ, _INSIDE: disks}, check=False).returncode
    return subprocess.run(command, env={**os.environ, _INSIDE: "0"}, check=False).returncode


if __name__ == "__main__":
    with terminate_as_interrupt():  # so that a campaign that is ended leaves no run behind
        sys.exit(main())
