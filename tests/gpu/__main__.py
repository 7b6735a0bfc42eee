"""`make gpu`: what only a GPU can show, each check in a process with a limit, in at most eight
minutes.

A check that fails, hangs or lacks a package ends nothing but itself. What was found is written
after each check, to `runs/gpu/part1.json` beside `logs.txt`: the environment, each check's status,
seconds and figures, and what was predicted of them. Without a GPU nothing is measured (status 5);
`ARGS=--rehearse` runs with small sizes what a CPU can.

Imports the standard library alone, so that it starts on a machine that lacks everything else.
Wheels that were brought along (`make gpu-wheels`) are installed into a folder of their own first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import install
from tests.gpu.checks import CHECKS, Bounds, Check

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 480.0
NO_GPU = 5
TIMED_OUT = 124
REHEARSAL = "HYBRIDFLOW_GPU_REHEARSAL"
TAIL = 200_000  # bytes of a check's output that are kept


def main(words: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """The exit status: 0 if every check passed, 1 if not, 5 without a GPU."""
    wishes = _arguments(checks).parse_args(words)
    chosen = [check for check in checks if check.part == wishes.part]
    if wishes.only:
        chosen = [check for check in checks if check.name in wishes.only]
    if wishes.list:
        print(
            "\n".join(f"{check.name:<20} {check.limit_s:4.0f} s  {check.shows}" for check in chosen)
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="hybridflow-gpu-") as folder:
        session = Session(Path(folder), wishes.out, f"part{wishes.part}", wishes.rehearse)
        if not wishes.rehearse and not session.has_gpu():
            print(
                "no GPU is visible to torch: nothing was measured (ARGS=--rehearse runs what a CPU "
                "can)"
            )
            return NO_GPU
        return session.run(chosen, wishes.budget)


def _arguments(checks: Sequence[Check]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make gpu", description="what only a GPU can show", allow_abbrev=False
    )
    parser.add_argument(
        "--part", type=int, choices=(1, 2, 3), default=1, help="1: alone, 2: SGLang, 3: TE"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[check.name for check in checks], help="these checks"
    )
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument(
        "--rehearse", action="store_true", help="run with small sizes what a CPU can"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for all checks together"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu", help="folder of the results")
    return parser


@dataclass
class Session:
    """One call of `make gpu`."""

    folder: Path
    out: Path
    name: str
    rehearse: bool

    def __post_init__(self) -> None:
        self.site = self.folder / "site"
        self.found: list[dict[str, Any]] = []
        # the third folder is what a .pth file of cutlass would name; none is read from PYTHONPATH
        cutlass = self.site / "nvidia_cutlass_dsl/dsl_packages"
        path = os.pathsep.join(
            filter(None, (str(ROOT), str(self.site), str(cutlass), os.environ.get("PYTHONPATH")))
        )
        self.env = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "HYBRIDFLOW_TRACEBACK": "1",
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        }
        if self.rehearse:
            self.env |= {REHEARSAL: "1", "HYBRIDFLOW_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}

    def has_gpu(self) -> bool:
        """Whether there is one. Where its driver is too old for torch, the check `environment` says
        that."""
        asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        seen = (
            subprocess.run(
                [sys.executable, "-c", asked], env=self.env, capture_output=True, check=False
            ).returncode
            == 0
        )
        return seen or Path("/dev/nvidiactl").exists()

    def run(self, checks: Sequence[Check], budget_s: float) -> int:
        """Install what was brought along, then run the checks one after another."""
        started = time.monotonic()
        if not self.rehearse:
            self._keep(install.install(self.site))
        for check in checks:
            command = check.rehearsal if self.rehearse else check.command
            left = budget_s - (time.monotonic() - started)
            self._keep([self._carry_out(check, command, min(check.limit_s, left))])
        failed = [one["check"] for one in self.found if one["status"] not in ("passed", "not run")]
        print(json.dumps(self._record(), indent=1))  # for whoever gets nothing but the output back
        print(
            f"{len(self.found) - len(failed)} of {len(self.found)} without a failure: "
            f"{self.out / self.name}.json"
        )
        return int(bool(failed))

    def _carry_out(
        self, check: Check, command: tuple[str, ...] | None, limit_s: float
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "check": check.name,
            "shows": check.shows,
            "predicted_s": check.predicted_s,
        }
        if reason := self._why_not(check, command, limit_s):
            return found | {"status": "not run", "why": reason}
        assert command is not None
        if check.run:
            command = (*command, f"output_dir={self.folder}/runs")
        begun = time.monotonic()
        log = self.folder / f"{check.name}.txt"
        env = self.env | ({"TRITON_INTERPRET": "1"} if self.rehearse and check.interpreted else {})
        status = _run(command, env, log, limit_s)
        text = log.read_text(errors="replace")[-TAIL:] if log.exists() else ""
        figures = _figures(text) | (
            _figures_of_run(self.folder / "runs" / check.run) if check.run else {}
        )
        outside = {} if self.rehearse else _outside(figures, check.passes)
        passed = status == 0 and not outside
        found |= {
            "status": "passed" if passed else "failed",
            "seconds": round(time.monotonic() - begun, 1),
        }
        if not passed:
            found["why"] = (
                f"took more than {limit_s:.0f} s"
                if status == TIMED_OUT
                else f"ended with status {status}"
            )
            found["why"] = (
                f"not within {outside}" if status == 0 else f"{found['why']}: {text[-1500:]}"
            )
        self._write("logs.txt", "a", f"\n===== {check.name}\n{text}")
        for engine in sorted(self.folder.glob(f"runs/{check.run or None}/logs/engine-*.log")):
            said = engine.read_text(errors="replace")[-TAIL:]
            self._write("logs.txt", "a", f"\n===== {check.name}: {engine.name}\n{said}")
        missed = {} if self.rehearse else _outside(figures, check.predicted, 0.2)
        return found | {
            "figures": figures,
            "predicted": check.predicted,
            "missed_by_more_than_20%": sorted(missed),
        }

    def _why_not(self, check: Check, command: tuple[str, ...] | None, limit_s: float) -> str:
        if command is None:
            return "needs a GPU"
        if limit_s < min(check.predicted_s, 10) and not self.rehearse:
            return "no time is left"
        for package in check.needs:
            asked = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
            if subprocess.run(
                [sys.executable, "-c", asked], env=self.env, capture_output=True, check=False
            ).returncode:
                return f"{package} is not installed"
        return ""

    def _keep(self, found: list[dict[str, Any]]) -> None:
        """Write everything again. A disk that is full costs the file, not the checks: the output
        has the same."""
        self.found += found
        for one in found:
            why = one.get("why", "").strip().splitlines()
            print(
                f"{one['check']:<20} {one['status']:<8} {one.get('seconds', 0):6.1f} s  "
                f"{why[-1][:120] if why else ''}",
                flush=True,
            )
        self._write(f"{self.name}.json", "w", json.dumps(self._record(), indent=1) + "\n")

    def _write(self, name: str, mode: str, text: str) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / name).open(mode) as file:
                file.write(text)
        except OSError as error:
            print(f"{name} could not be written: {error}", flush=True)

    def _record(self) -> dict[str, Any]:
        return {
            "rehearsal": self.rehearse,
            "measured": "nothing: no GPU"
            if self.rehearse
            else "on the GPU of the check `environment`",
            "commit": _commit(),
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "checks": self.found,
        }


def _run(command: Sequence[str], env: dict[str, str], log: Path, limit_s: float) -> int:
    """Exit status, 124 after the limit. Nothing that the check started outlives it."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _figures(text: str) -> dict[str, Any]:
    """What a check said in its last line `RESULT {...}`; a failed one may have said some before it
    failed."""
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    try:
        return dict(json.loads(lines[-1].removeprefix("RESULT "))) if lines else {}
    except ValueError:
        return {"unreadable": lines[-1][:200]}


def _figures_of_run(run: Path) -> dict[str, Any]:
    """Log-probability differences and the seconds of each phase of a run's last step."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    last = next((step for step in reversed(steps) if step.get("phase") == "train"), {})
    wanted = ("timing_s/", "sync/", "perf/max_memory", "perf/throughput")
    figures = {name: value for name, value in last.items() if name.startswith(wanted)}
    return {
        name: summary.get(name) for name in ("logprob_diff_mean", "logprob_diff_max", "steps")
    } | figures


def _outside(
    figures: dict[str, Any], bounds: dict[str, Bounds], slack: float = 0.0
) -> dict[str, Bounds]:
    """The bounds that a figure is missing from, or outside of by more than this share."""
    return {
        name: (low, high)
        for name, (low, high) in bounds.items()
        if not isinstance(figures.get(name), (int, float))
        or not low * (1 - slack) <= figures[name] <= high * (1 + slack)
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
