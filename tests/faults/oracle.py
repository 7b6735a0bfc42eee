"""Whether a disturbed run is what an undisturbed one is."""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path
from typing import Any

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import list_dumps, read_rollouts

# Times, sizes of processes, and counts of what was disturbed. The engines' own log-probabilities
# depend in their last bits on which prompts were computed together; nothing is trained on them.
NOT_COMPARED = (
    *(
        "wall_time",
        "timing_",
        "perf/",
        "engine/",
        "controller/",
        "trainer/restarts",
        "rollout/",
        "memory/",
        "sync/",
    ),
    "weight_sync/",
)
EACH_SAMPLE = ("uid", "prompt_text", "response_text", "score", "weight_version")


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """What differs between the records, samples and weights of two finished runs, a line each."""
    found = []
    ours = _records(folder)
    theirs = _records(undisturbed)
    if sorted(ours) != sorted(theirs):
        found.append(f"recorded {sorted(ours)}, not {sorted(theirs)}")
    for key in [key for key in theirs if key in ours]:
        if len(ours[key]) != 1:
            found.append(f"{key} is recorded {len(ours[key])} times")
        names = ours[key][0].keys() | theirs[key][0].keys()
        wrong = sorted(name for name in names if ours[key][0].get(name) != theirs[key][0].get(name))
        found += [f"{key}: {name} differs" for name in wrong if _is_compared(name)]
    for part in ("rollouts", "validation"):
        found += _differing_samples(folder / part, undisturbed / part)
    weights = [
        {path.name: _digest(path) for path in at.glob("export/*.safetensors")}
        for at in (folder, undisturbed)
    ]
    if not weights[0] or weights[0] != weights[1]:
        found.append("the exported weights differ")
    return found


def _is_compared(name: str) -> bool:
    """Also for a further policy's metric, whose name begins with that of its role."""
    return not (name.startswith(NOT_COMPARED) or name.partition("/")[2].startswith(NOT_COMPARED))


def step_seconds(folder: Path) -> float:
    """Median seconds of a step."""
    steps = [
        record["timing_s/step"]
        for record in read_jsonl(folder / "metrics.jsonl")
        if record["phase"] == "train"
    ]
    return statistics.median(steps)


def _records(folder: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in read_jsonl(folder / "metrics.jsonl"):
        found.setdefault((record["phase"], record["step"]), []).append(record)
    return found


def _differing_samples(ours: Path, theirs: Path) -> list[str]:
    samples = [
        {
            step: [tuple(row.get(name) for name in EACH_SAMPLE) for row in read_rollouts(path)]
            for step, path in found
        }
        for found in (list_dumps(ours), list_dumps(theirs))
    ]
    steps = sorted(samples[0].keys() | samples[1].keys())
    wrong = [step for step in steps if samples[0].get(step) != samples[1].get(step)]
    return [f"{ours.name} of steps {wrong} differ"] if wrong else []


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
