"""`WorkerGroup`: one actor process a rank, called as a whole through the methods of the worker class."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.dispatch import CallPlan, Dispatch, Execute, Mesh, MethodSpec, WorkerContext, method_spec, plan_call
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.single_controller.cluster import Cluster
from hybridflow.single_controller.future import Future, Rank
from hybridflow.single_controller.host import Host, HostInfo
from hybridflow.single_controller.resource_pool import ResourcePool

_SMALL = (str, bytes, int, float, bool, type(None))
_KILL_WAIT_S = 5.0
_MESH_SPEC = MethodSpec("mesh_position", Dispatch.ONE_TO_ALL, Execute.ALL, True, (), ())


class WorkerGroup:
    """Worker processes, one in each slot of a pool, in rank order.

    Calls on one rank are executed in the order they were submitted. Several groups can live in one cluster and one pool.
    """

    def __init__(
        self,
        cluster: Cluster,
        pool: ResourcePool,
        worker_class: type,
        *,
        role: str,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
        log_dir: str | Path,
    ) -> None:
        """Start all ranks and construct `worker_class(context, *args)` in each.

        Args:
            cluster, pool: where; `len(pool)` is the world size.
            worker_class: a plain class with `@register`-ed methods.
            role: name in errors and log files.
            args: the same for all ranks, picklable.
            env: environment of the processes, set before the worker's module is imported.
            log_dir: `{role}-rank{r}.log` there receives stdout and stderr of rank r.

        Raises:
            WorkerError: a rank did not come up within `cluster.config.start_timeout_s`, or its constructor raised.
            HybridFlowError: a constructor raised one of our errors (same type).
        """
        cluster.require_open()
        self.role, self.worker_class, self.world_size = role, worker_class, len(pool)
        self._config = cluster.config
        self._mesh: Mesh | None = None
        self._broken: HybridFlowError | None = None
        self._ranks = _start_actors(cluster, pool, role, Path(log_dir).resolve())
        try:
            self._bring_up(pool, tuple(args), dict(env or {}))
        except BaseException:
            self.kill()
            raise

    def run(self, method: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the worker class on the group and wait; a method registered `blocking=False` gives a `Future` at once.

        Args:
            method: the function on the class, e.g. `PolicyWorker.compute_log_probs`.
            args, kwargs: as its `@register` says they are spread.
            timeout: seconds; None: `cluster.config.call_timeout_s`.

        Raises:
            WorkerError: a rank died, raised or did not answer in time.
            SchemaError: arguments or results do not fit the declaration of the method.
            HybridFlowError: a rank raised one of our errors (same type).
        """
        future = self.submit(method, *args, timeout=timeout, **kwargs)
        return future.result() if method_spec(method).blocking else future

    def submit(self, method: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Future:
        """Start a call and return its `Future`; `timeout` is what its `result()` waits by default."""
        spec = method_spec(method)
        self._require_own(method, spec)
        if self._broken is not None:
            raise self._broken
        plan = plan_call(spec, self.world_size, self._find_mesh() if spec.needs_mesh else None, args, kwargs)
        return self._launch(spec.name, plan, timeout)

    @property
    def mesh(self) -> Mesh | None:
        """Data-parallel positions of the ranks, asked once; None for a class without `mesh_position`."""
        return self._find_mesh()

    def pids(self) -> list[int]:
        """Process ids in rank order (on their nodes)."""
        return [rank.pid for rank in self._ranks]

    def log_paths(self) -> list[Path]:
        """Log file of each rank."""
        return [rank.log_path for rank in self._ranks]

    def kill(self) -> None:
        """End all processes of the group at once; their children go with them. A second call does nothing."""
        import ray

        ranks, self._ranks = self._ranks, []
        if ray.is_initialized():
            for rank in ranks:
                ray.kill(rank.actor, no_restart=True)
        self._broken = self._broken or WorkerError("the group was killed", role=self.role)
        _end_processes([rank.pid for rank in ranks if rank.is_local and rank.pid])

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _bring_up(self, pool: ResourcePool, args: tuple[Any, ...], env: dict[str, str]) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        slots = pool.slots
        infos: list[HostInfo] = self._everywhere("describe", [(slot.node,) for slot in slots], deadline)
        for rank, info in zip(self._ranks, infos, strict=True):
            rank.pid = info.pid
        contexts = [self._context(pool, r, infos) for r in range(self.world_size)]
        self._everywhere("set_up", [(c.log_path, _environment(c, env), sys.path) for c in contexts], deadline)
        self._everywhere("construct", [(self.worker_class, c, args) for c in contexts], deadline)

    def _context(self, pool: ResourcePool, rank: int, infos: Sequence[HostInfo]) -> WorkerContext:
        slot = pool.slots[rank]
        # With a GPU in its bundle, Ray shows the process that one device alone (CUDA_VISIBLE_DEVICES), as number 0.
        local_rank = 0 if pool.gpus else slot.local_rank
        return WorkerContext(
            rank, self.world_size, local_rank, pool.slots[0].node, infos[0].free_port, slot.node, self._ranks[rank].log_path
        )

    def _everywhere(self, step: str, arguments: Sequence[tuple[Any, ...]], deadline: float) -> list[Any]:
        """Run a step of `Host` on all ranks by the deadline."""
        refs = {r: getattr(rank.actor, step).remote(*arguments[r]) for r, rank in enumerate(self._ranks)}
        name = "start-up" if step != "construct" else f"{self.worker_class.__name__}.__init__"
        left = max(0.0, deadline - time.monotonic())
        future = Future(self.role, name, ranks=self._ranks, refs=refs, collect=_in_rank_order, default_timeout_s=left)
        return future.result()

    def _launch(self, name: str, plan: CallPlan, timeout: float | None) -> Future:
        sent: dict[int, Any] = {}  # the ranks of a data-parallel group hold the same chunk: stored once
        refs = {}
        for r, call in plan.calls.items():
            values = [_stored(value, sent) for value in (*call.args, *call.kwargs.values())]
            refs[r] = self._ranks[r].actor.call.remote(name, tuple(call.kwargs), *values)
        wait = self._config.call_timeout_s if timeout is None else timeout
        return Future(
            self.role,
            name,
            ranks=list(self._ranks),
            refs=refs,
            collect=plan.collect,
            default_timeout_s=wait,
            on_lost=self._note_loss,
        )

    def _find_mesh(self) -> Mesh | None:
        if self._mesh is None and hasattr(self.worker_class, "mesh_position") and self._broken is None:
            plan = plan_call(_MESH_SPEC, self.world_size, None, (), {})
            self._mesh = Mesh(tuple(self._launch("mesh_position", plan, None).result()))
        return self._mesh

    def _require_own(self, method: Callable[..., Any], spec: MethodSpec) -> None:
        own = any(vars(base).get(spec.name) is method for base in inspect.getmro(self.worker_class))
        if not own:
            raise TypeError(
                f"{getattr(method, '__qualname__', method)} is not a method of {self.worker_class.__name__}, which {self.role} runs"
            )

    def _note_loss(self, error: HybridFlowError) -> None:
        """After a death or a hang the ranks no longer stand at the same point: every later call would hang too."""
        self._broken = error


def _in_rank_order(results: Mapping[int, Any]) -> list[Any]:
    return [results[rank] for rank in sorted(results)]


def _start_actors(cluster: Cluster, pool: ResourcePool, role: str, log_dir: Path) -> list[Rank]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = round(1.0 / pool.max_colocate, 4)
    remote = ray.remote(Host)
    here = ray.util.get_node_ip_address()
    ranks = []
    for r, slot in enumerate(pool.slots):
        actor = remote.options(
            num_cpus=share,
            num_gpus=share if pool.gpus else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(slot.placement_group, placement_group_bundle_index=slot.bundle_index),
        ).remote()
        ranks.append(Rank(actor, slot.node, log_dir / f"{role}-rank{r}.log", cluster.is_local or slot.node == here))
    return ranks


def _environment(context: WorkerContext, extra: Mapping[str, str]) -> dict[str, str]:
    env = {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank),
        "MASTER_ADDR": context.master_addr,
        "MASTER_PORT": str(context.master_port),
        "OMP_NUM_THREADS": "1",
    }
    if context.master_addr in ("127.0.0.1", "::1"):
        env["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would listen on the interface of the host name
    return {**env, **extra}


def _stored(value: Any, sent: dict[int, Any]) -> Any:
    """Reference to the value in the object store, one for each object; small values travel with the call."""
    import ray

    if isinstance(value, _SMALL):
        return value
    if id(value) not in sent:
        sent[id(value)] = ray.put(value)
    return sent[id(value)]


def _end_processes(pids: Sequence[int]) -> None:
    """Wait until the processes are gone, and make sure of it: one that is stuck in the kernel's or its own code gets SIGKILL."""
    deadline = time.monotonic() + _KILL_WAIT_S
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _is_running(pid)]
        time.sleep(0.05)
    for pid in left:
        if _is_running(pid):
            os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
