"""What each rank does in the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.schema import OptimConfig
from tests.dist.harness.policies import batch_of, digest, policy_of, share_of


def resumable(parallel: dict[str, Any], hf: dict[str, Any], eps: float = 1e-3) -> Any:
    """A policy with optimizer and reference. The large epsilon: see `parity_cases`."""
    policy = policy_of(parallel, hf)
    policy.set_optimizer(
        OptimConfig(
            lr=1e-2, lr_decay_style="linear", lr_decay_steps=9, weight_decay=0.1, adam_eps=eps
        )
    )
    policy.freeze_reference()
    return policy


def steps(policy: Any, numbers: range) -> list[list[float]]:
    """(grad norm, lr) a step of plain cross-entropy."""
    from hybridflow.workers.losses import sft_loss

    history = []
    for step in numbers:
        batch = share_of(batch_of(8, step))
        _, info = policy.train_mini_batch(
            batch, sft_loss, columns=(), max_tokens=40, temperature=1.0, with_entropy=False
        )
        history.append([info["grad_norm"], info["lr"]])
    return history


def state_of(policy: Any) -> dict[str, Any]:
    """What must be equal after a resume: weights, reference, random state of this rank."""
    with policy.as_reference():
        reference = digest(policy)
    return {"weights": digest(policy), "reference": reference, "random": torch.rand(3).tolist()}


def save_and_go_on(
    parallel: dict[str, Any], hf: dict[str, Any], folder: str, full_disk_on: int
) -> Any:
    """Two steps, a checkpoint in the background while three more are taken; then saves that fail on
    one rank, in both ways."""
    import resource

    from hybridflow.errors import CheckpointError
    from hybridflow.mcore.checkpoint import Saver

    policy = resumable(parallel, hf)
    saver = Saver(policy, timeout_s=60)
    steps(policy, range(2))
    saver.start(Path(folder) / "good", phase="rl", step=2)
    result = {"history": steps(policy, range(2, 5)), "errors": {}}
    saver.wait(60)
    result |= state_of(policy)
    if dist.get_rank() == full_disk_on:  # as a full disk: files end after 4 KiB
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for name, save in (("bad", saver.save), ("later", saver.start)):
        try:
            save(Path(folder) / name)
            saver.wait(60)
        except CheckpointError as error:
            result["errors"][name] = str(error)
    # what a rank returns goes to a file, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return result


def load_and_go_on(
    parallel: dict[str, Any],
    hf: dict[str, Any],
    folder: str,
    broken: list[str],
    other: dict[str, Any],
) -> Any:
    """The same three steps in a new world, from the checkpoint; then what loading each broken one
    says, and one of another model."""
    from hybridflow.errors import CheckpointError
    from hybridflow.mcore import checkpoint

    policy = resumable(parallel, hf)
    checkpoint.load(policy, Path(folder) / "good")
    result = {"history": steps(policy, range(2, 5)), **state_of(policy), "errors": {}}
    before = digest(policy)
    for name in broken:
        try:
            checkpoint.load(policy, Path(folder) / name)
        except CheckpointError as error:
            result["errors"][name] = str(error)
    result["untouched"] = digest(policy) == before
    for name, changed in other.items():
        policy.family.hf = {**hf, **changed}
        try:
            checkpoint.load(policy, Path(folder) / "good")
        except CheckpointError as error:
            result["errors"][name] = str(error)
    return result


def resume_with_other_settings(parallel: dict[str, Any], hf: dict[str, Any], folder: str) -> Any:
    """Load the checkpoint under other optimizer settings; the rate of the next update and the
    groups' weight decay."""
    from hybridflow.mcore import checkpoint

    policy = policy_of(parallel, hf)
    policy.set_optimizer(OptimConfig(lr=1e-5, weight_decay=0.3, adam_eps=1e-3))
    checkpoint.load(policy, Path(folder) / "good")
    decays = {group["weight_decay"] for group in policy.optimizer.inner.param_groups}
    [[_, rate]] = steps(policy, range(2, 3))
    return {"rate": rate, "decays": sorted(decays)}


def export_and_save(
    parallel: dict[str, Any], hf: dict[str, Any], folder: str, max_shard_bytes: int
) -> None:
    """The same weights as a Hugging Face folder and as a checkpoint."""
    from hybridflow.mcore import checkpoint
    from hybridflow.mcore.hf_export import export

    policy = resumable(parallel, hf)
    steps(policy, range(1))
    export(policy, Path(folder) / "hf", hf, None, max_shard_bytes)
    checkpoint.save(policy, Path(folder) / "checkpoint", phase="rl", step=3)


def memory_of_export(parallel: dict[str, Any], hf: dict[str, Any], folder: str) -> dict[str, int]:
    """Bytes by which this rank's resident memory grows at most during an export; the size of the
    model and of its largest tensor."""
    import gc
    from math import prod
    from threading import Event, Thread

    import psutil

    from hybridflow.mcore.hf_export import export

    policy = policy_of(parallel, hf)
    gc.collect()
    process = psutil.Process()
    stop = Event()
    peak = [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(0.0005):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = Thread(target=watch)
    thread.start()
    export(policy, Path(folder), hf, None, 64 << 20)
    stop.set()
    thread.join()
    sizes = [4 * prod(shape) for shape in policy.family.tensors().values()]
    return {"grown": peak[0] - before, "model": sum(sizes), "largest": max(sizes)}
