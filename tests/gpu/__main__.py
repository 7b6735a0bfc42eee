"""`make gpu`: what only a GPU can show, in the order in which a failure says most, each within ten minutes.

Without a GPU it says so, runs nothing, and exits with status 5. `ARGS="--list"` names the checks, `ARGS="--from NAME"`
begins with one. It stops at the first failure (status 1) and leaves what it found in `runs/gpu/checks.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.device.platform import Platform

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, NO_GPU = 600, 5
COLOCATED = (
    *("cluster.procs_per_node=1", "cluster.devices_per_node=1", "actor.parallel.tensor=1", "actor.parallel.pipeline=1"),
    *("actor.parallel.expert=1", "actor.parallel.sequence=false", "rollout.num_engines=1", "rollout.pool=actor"),
    *("rollout.sleep_while_training=true", "actor.offload={weights: true, gradients: true, optimizer: true}"),
    *("model.dtype=bfloat16", "rollout.logprob_diff_bound=null", "sft.steps=0", "trainer.total_steps=3"),
)


# the same run with the layers of Qwen3 0.6B, at random
SHAPE = (
    *("model=qwen3-0.6b", "model.tokenizer=${data.prepare.out}/tokenizer", "rollout=gpu", *COLOCATED),
    *("rollout.mem_fraction_static=0.5", "trainer.export=false"),
)
TRAIN = ("-m", "hybridflow.cli.main", "train", "--config-name", "tiny-moe-grpo")


@dataclass(frozen=True)
class Check:
    """A command that must end with status 0."""

    name: str
    shows: str
    command: tuple[str, ...]


CHECKS = (
    Check("lock", "the lock's libraries can be imported, and the driver is new enough", ("-m", "tests.gpu.lock")),
    Check(
        "cuda-ipc",
        "the contract of the transports over memory of one GPU: exact bytes, faults, deadlines",
        ("-m", "pytest", "-q", "tests/gpu/test_cuda_ipc.py"),
    ),
    Check(
        "trainer",
        "log-probabilities of torch's and Transformer Engine's layers are those of a CPU; offloaded weights come back",
        ("-m", "pytest", "-q", "tests/gpu/test_trainer.py"),
    ),
    Check(
        "adam",
        "a run that was saved and loaded goes on as one that was not, with the Adam that is installed",
        ("-m", "pytest", "-q", "tests/gpu/test_resume.py"),
    ),
    Check(
        "sleep",
        "everything leaves the GPU and comes back twenty times: the same numbers, and no memory lost",
        ("-m", "pytest", "-q", "tests/gpu/test_sleep.py"),
    ),
    Check(
        "weights",
        "an update without weights leaves an engine's checksum; weights of a colocated sync are those of a cold start",
        ("-m", "pytest", "-q", "tests/gpu/test_weights.py"),
    ),
    Check(
        "train-step",
        "an update at the shape of Qwen3 0.6B reaches a share of the matrix peak of this GPU",
        ("-m", "tests.gpu.train_step"),
    ),
    Check(
        "colocated",
        "three steps of GRPO with the engine on the trainer's GPU, in turns, weights over cuda_ipc",
        ("-m", "hybridflow.cli.main", "train", "--config-name", "tiny-moe-grpo", "name=gpu-colocated", *COLOCATED),
    ),
    Check(
        "resumed",
        "the same run goes on from its checkpoint",
        (
            *("-m", "hybridflow.cli.main", "train", "--config-name", "tiny-moe-grpo", "name=gpu-colocated"),
            *(*COLOCATED[:-1], "trainer.total_steps=5"),
        ),
    ),
    Check(
        "0.6b",
        "three colocated steps of GRPO at the shape of Qwen3 0.6B, the engine with graphs",
        (*TRAIN, "name=gpu-0.6b", *SHAPE),
    ),
    Check(
        "fp8",
        "the same with the engine in fp8: its log-probabilities are near the trainer's, or the run stops",
        (*TRAIN, "name=gpu-fp8", *SHAPE, "rollout.quantization=fp8", "rollout.logprob_diff_bound=0.5"),
    ),
)


def run(check: Check) -> tuple[int, float]:
    """Exit status, 124 after ten minutes, and seconds. Nothing that the check started outlives it."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, *check.command], cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, time.monotonic() - started


def main(
    words: Sequence[str] | None = None,
    platform: Callable[[], Platform] = Platform.detect,
    carry_out: Callable[[Check], tuple[int, float]] = run,
    results: Path = ROOT / "runs/gpu/checks.json",
) -> int:
    """The exit status of the whole."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="make gpu", description="what only a GPU can show")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--from", dest="first", choices=names, default=names[0], help="begin with this one")
    wishes = parser.parse_args(words)
    if wishes.list:
        print("\n".join(f"{check.name:<10} {check.shows}" for check in CHECKS))
        return 0
    if platform().kind != "cuda":
        print(f"no GPU is visible to torch: nothing was run (the checks: {', '.join(names)})")
        return NO_GPU
    found = []
    for check in CHECKS[names.index(wishes.first) :]:
        print(f"{check.name}: {check.shows}", flush=True)
        status, seconds = carry_out(check)
        found.append({"check": check.name, "status": status, "seconds": round(seconds, 1)})
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(found, indent=2) + "\n")
        if status:
            why = f"took more than {LIMIT_S} s" if status == 124 else f"ended with status {status}"
            print(f"{check.name} {why}; go on with ARGS='--from {check.name}'")
            return 1
    print(f"all {len(found)} checks passed: {results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
