"""Two ranks that save checkpoints in the background until they are killed, started again and again
out of one warm process.

The parent has imported everything but opened no socket and started no thread; each trial forks two
children, which join a world, load the last checkpoint (proving it loadable), and go on saving. The
test kills them by their ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.dist.harness.policies import policy_of
from tests.models import WIDE


class Ranks:
    """What the driver's store asks of the ranks, on rank 0 (rank 1 does the same calls beside
    it)."""

    def __init__(self, saver: Any) -> None:
        self.saver = saver

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.saver.start(folder, phase=phase, step=step)

    async def is_saved(self) -> bool:
        return bool(self.saver.done())


def say(**what: Any) -> None:
    """A line to the test, in one piece: three processes write to the same pipe."""
    os.write(sys.stdout.fileno(), (json.dumps(what) + "\n").encode())


def values(policy: Any) -> list[torch.Tensor]:
    """Every tensor that a checkpoint holds of this rank, but the random state."""
    from hybridflow.mcore.sharded_state import ShardedState

    return [tensor.data for tensor in ShardedState(policy, with_random_state=False).tensors]


def serve(folder: Path) -> None:
    """The life of one rank."""
    from hybridflow.config.schema import OptimConfig
    from hybridflow.mcore import checkpoint
    from hybridflow.saving.store import CheckpointStore, Retention
    from hybridflow.single_controller import block_on

    rank = int(os.environ["RANK"])
    policy = policy_of({"tensor": 2, "sequence": True}, WIDE)
    policy.set_optimizer(OptimConfig())
    saver = checkpoint.Saver(policy, timeout_s=20)
    store = CheckpointStore(folder, Retention(last=1), background=True, timeout_s=20)
    latest = store.latest()
    step = 0
    if latest is not None:
        checkpoint.load(policy, latest.policy)
        found = {
            float(value) for tensor in values(policy) for value in (tensor.min(), tensor.max())
        }
        assert found == {float(latest.step)} and latest.state == {"step": latest.step}, (
            found,
            latest,
        )
        step = latest.step
    say(rank=rank, loaded=step)
    while True:
        step += 1
        for tensor in values(policy):
            tensor.fill_(step)
        if rank == 0:
            block_on(store.save("rl", step, {"step": step}, Ranks(saver)))
        else:
            saver.start(folder / f"global_step_{step}.partial" / "policy", phase="rl", step=step)
        for tensor in values(policy):
            tensor.fill_(-1)  # training goes on over the live memory
        if rank == 0:
            block_on(store.wait())
        else:
            saver.wait(20)
            while (latest := store.latest()) is None or latest.step != step:
                time.sleep(0.001)


def main() -> None:
    """One line of JSON a trial on stdin ({port, folder}); prints the ranks' ids, and when both have
    ended how."""
    import hybridflow.mcore.checkpoint
    import hybridflow.mcore.policy
    import hybridflow.models.families.qwen3
    import hybridflow.workers.losses  # noqa: F401
    from hybridflow.process.children import die_with_parent

    for line in sys.stdin:
        trial = json.loads(line)
        pids = []
        server = os.getpid()
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                die_with_parent(server)
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(trial["port"]),
                }
                try:
                    serve(Path(trial["folder"]))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        say(pids=pids)
        ends = [os.waitpid(pid, 0)[1] for pid in pids]
        say(ends=[os.waitstatus_to_exitcode(end) for end in ends])


if __name__ == "__main__":
    main()
