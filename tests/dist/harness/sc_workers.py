"""Worker classes for the tests of the controller. Importable by the worker processes; free of Ray
like the real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.dispatch import PADDING_META, Dispatch, MeshPosition, WorkerContext, register
from hybridflow.errors import EngineError, ModelError, WeightSyncError
from hybridflow.process.children import state_of
from tests.dist.harness.children import start_child


class Worker:
    """Data-parallel groups of 2 ranks; the second rank of each group, or one that is left over,
    collects."""

    def __init__(self, context: WorkerContext, scale: int = 1) -> None:
        self.context = context
        self.scale = scale
        self.calls = []
        print(f"rank {context.rank} is up")

    def mesh_position(self) -> MeshPosition:
        rank = self.context.rank
        size = self.context.world_size
        return MeshPosition(rank // 2, (size + 1) // 2, rank % 2 == 1 or rank == size - 1)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str | int]:
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
            "EXTRA",
        )
        return {name: os.environ.get(name, "") for name in names} | {"pid": os.getpid()}

    @register(Dispatch.ALL_TO_ALL)
    def add(self, a: int, b: int) -> int:
        return a + b * self.scale

    @register(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.context.rank

    @register(Dispatch.DP, reads=("uid", "ids"), writes=("uid", "total", "rank"))
    def totals(self, batch: DataProto) -> DataProto:
        assert batch.columns == ("uid", "ids"), batch.columns
        total = np.asarray([row.sum() for row in batch["ids"]])
        rank = np.full(len(batch), self.context.rank)
        return DataProto.from_columns({"uid": batch["uid"], "total": total, "rank": rank})

    @register(Dispatch.DP)
    def passed_through(self, batch: DataProto) -> DataProto:
        return batch.with_columns(writeable=np.full(len(batch), batch["uid"].flags.writeable))

    @register(Dispatch.DP_METRIC)
    def size(self, batch: DataProto, tag: str) -> tuple[str, int, int]:
        return tag, len(batch), batch.meta.get(PADDING_META, 0)

    @register(Dispatch.ONE_TO_ALL)
    def nap(self, number: int, seconds: float) -> list[int]:
        time.sleep(seconds)
        self.calls.append(number)
        return self.calls

    @register(Dispatch.ONE_TO_ALL)
    def meet(self, folder: str, name: str, other: str) -> str:
        """Return when ranks of another group have come to the same folder."""
        (Path(folder) / name).touch()
        while not (Path(folder) / other).exists():
            time.sleep(0.01)
        return "met"

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def async_nap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"

    @register(Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int, kind: str) -> None:
        """`rank` raises, the others block as in a collective."""
        if self.context.rank != rank:
            time.sleep(600)
        if kind == "engine":
            raise EngineError("it refused", engine="engine-3", log_tail="its last words")
        raise {"model": ModelError, "sync": WeightSyncError, "value": ValueError}[kind](
            f"{kind} trouble"
        )

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int, how: str) -> None:
        """`rank` dies; the next one notices and raises as gloo would; the others block."""
        folder = self.context.log_path.parent
        number = f"pid-{rank}"
        if self.context.rank == rank:
            print("famous last words", flush=True)
            (folder / f"{number}.part").write_text(str(os.getpid()))
            (folder / f"{number}.part").rename(folder / number)
            if how == "exit":
                sys.exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.context.rank == (rank + 1) % self.context.world_size:
            while not (folder / number).exists() or state_of(
                int((folder / number).read_text())
            ) not in ("", "Z"):
                time.sleep(0.01)
            raise RuntimeError("Connection closed by peer")
        time.sleep(600)

    @register(Dispatch.ONE_TO_ALL)
    def hang_on(self, rank: int) -> None:
        if self.context.rank == rank:
            time.sleep(120)

    @register(Dispatch.ONE_TO_ALL)
    def start_sleeper(self) -> int:
        return start_child(["sleep", "600"]).pid


class Counter:
    """Counts calls; can be asked to stop in the debugger."""

    def __init__(self, context: WorkerContext, start: int = 0) -> None:
        self.context = context
        self.count = start

    @register(Dispatch.ONE_TO_ALL)
    def next(self) -> int:
        self.count += 1
        return self.count

    @register(Dispatch.ONE_TO_ALL)
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @register(Dispatch.RANK_ZERO)
    def stop_here(self, value: int) -> int:
        seen = value + 1
        breakpoint()
        return seen


class Tokens:
    """Writes a large jagged column, a small one of bfloat16 and the uid; `width` ranks form a
    data-parallel group."""

    def __init__(self, context: WorkerContext, width: int) -> None:
        self.context = context
        self.width = width

    def mesh_position(self) -> MeshPosition:
        rank = self.context.rank
        return MeshPosition(
            rank // self.width,
            self.context.world_size // self.width,
            rank % self.width == self.width - 1,
        )

    @register(Dispatch.DP, reads=("uid",), writes=("uid", "tokens", "weight"))
    def generate(self, batch: DataProto, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        tokens = Jagged.from_rows(
            [np.full(3000 - uid, uid) for uid in batch["uid"].tolist()], np.int64
        )
        made = DataProto.from_columns(
            {"uid": batch["uid"], "tokens": tokens, "weight": np.zeros((len(batch), 2), np.uint16)},
            bfloat16=["weight"],
        )
        return made

    @register(Dispatch.DP, reads=("uid", "tokens"), writes=("uid", "total"))
    def sums(self, batch: DataProto) -> DataProto:
        assert not batch.deferred
        return DataProto.from_columns(
            {"uid": batch["uid"], "total": np.array([int(row.sum()) for row in batch["tokens"]])}
        )

    @register(Dispatch.DP, writes=("a", "b"))
    def wrong_columns(self, batch: DataProto) -> DataProto:
        return DataProto.from_columns({"a": batch["uid"]})

    @register(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.context.rank


class BadConstructor:
    def __init__(self, context: WorkerContext) -> None:
        if context.rank == 1:
            raise ModelError("hidden size 10 does not divide by 4 heads")


class NoMesh:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(Dispatch.DP)
    def work(self, batch: DataProto) -> DataProto:
        return batch


class GlooWorker:
    """All-reduces through torch.distributed: the environment is enough for `init_process_group`."""

    def __init__(self, context: WorkerContext) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.context = context

    @register(Dispatch.ONE_TO_ALL)
    def total(self, value: int) -> int:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value + self.context.rank])
        dist.all_reduce(tensor)
        return int(tensor)


def run_until_killed(out: Path) -> None:
    """A driver for the SIGKILL test: two ranks with a child each; writes the pids and waits."""
    from hybridflow.config.schema import ClusterConfig
    from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup

    cluster = Cluster.start(ClusterConfig(procs_per_node=2), out)
    pool = ResourcePool.allocate(cluster, 1, 2)
    group = WorkerGroup(cluster, pool, Worker, role="actor", log_dir=out / "logs")
    children = group.run(Worker.start_sleeper)
    part = out / "pids.part"
    part.write_text(" ".join(map(str, [*group.pids(), *children])) + f"\n{cluster.temp_dir}")
    part.rename(out / "pids")
    group.call(Worker.hang_on, 0)
    time.sleep(600)


def join_and_count(address: str, run_dir: str) -> None:
    """Another driver: joins the cluster and the detached group `counter`, and prints what it
    answers."""
    from hybridflow.config.schema import ClusterConfig
    from hybridflow.single_controller import Cluster, WorkerGroup

    with Cluster.start(ClusterConfig(address=address), run_dir) as cluster:
        group = WorkerGroup.join(cluster, Counter, "counter")
        print("joined", group.role, group.world_size, group.run(Counter.next))


if __name__ == "__main__":
    if sys.argv[1] == "join":
        join_and_count(*sys.argv[2:])
    else:
        run_until_killed(Path(sys.argv[1]))
