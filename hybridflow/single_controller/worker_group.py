"""The worker group: one actor process per rank. The group is called as a unit, through the worker
class's methods.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.dispatch import (
    CallPlan,
    Dispatch,
    Execute,
    Mesh,
    MethodSpec,
    RankCall,
    WorkerContext,
    in_rank_order,
    method_spec,
    plan_call,
)
from hybridflow.errors import HybridFlowError, ResourceError, WorkerError
from hybridflow.observe import spans
from hybridflow.process.children import end_processes, is_running
from hybridflow.process.surroundings import import_path
from hybridflow.single_controller.actors import (
    environment,
    join_actors,
    placed_environment,
    start_actors,
)
from hybridflow.single_controller.cluster import Cluster
from hybridflow.single_controller.event_loop import block_on
from hybridflow.single_controller.future import Future, Rank
from hybridflow.single_controller.host import HostInfo, address_of
from hybridflow.single_controller.remote_node import RemoteNode
from hybridflow.single_controller.resource_pool import ResourcePool
from hybridflow.single_controller.stored import INLINE_BYTES, At, Outgoing, Request, is_small

_ALIVE_S = 5.0  # timeout for a rank on another node to reply; no reply means busy, not dead
_CLOCK_PROBES = 5  # the measurement with the shortest round trip is used
_MESH_SPEC = MethodSpec("mesh_position", Dispatch.ONE_TO_ALL, Execute.ALL, True, (), ())


class WorkerGroup:
    """Worker processes, one in each slot of a pool, in rank order.

    Each rank executes calls in the order in which they were submitted. Several groups can share a
    cluster or a pool.
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
        name: str | None = None,
        fork_server: str = "",
    ) -> None:
        """Start all ranks and construct `worker_class(context, *args)` in each.

        Args:
            cluster, pool: cluster and slots of the ranks; `len(pool)` is the world size.
            worker_class: a plain class with `@register`-ed methods.
            role: name in errors and log files.
            args: picklable arguments, the same for all ranks.
            env: environment of the processes, set before the worker's module is imported.
            log_dir: folder of the log files `{role}-rank{r}.log`, which contain the stdout and
                stderr of rank r.
            name: if set, the group is detached: it outlives this driver, and another driver can
                `join` it. Its pool must also be detached.
            fork_server: name of a fork server on this machine from which to fork the processes; ""
                starts new interpreters.

        Raises:
            ResourceError: a group with this name exists.
            WorkerError: a rank did not start within `cluster.config.start_timeout_s`, or its
                constructor raised an exception.
            HybridFlowError: a constructor raised this error, which is re-raised with the same type.
        """
        cluster.require_open()
        self.role = role
        self.worker_class = worker_class
        self.world_size = len(pool)
        self._cluster = cluster
        self._log_dir = Path(log_dir).resolve()
        self._name = name
        self._pool: ResourcePool | None = pool
        self._args = tuple(args)
        self._env = dict(env or {})
        self._fork_server = fork_server
        self._restart_hooks: list[Callable[[], Awaitable[None]]] = []
        self._config = cluster.config
        self._mesh: Mesh | None = None
        self._broken: HybridFlowError | None = None
        self._ranks: list[Rank] = []
        block_on(self._start(pool))

    @classmethod
    def join(cls, cluster: Cluster, worker_class: type, name: str) -> WorkerGroup:
        """Connect to the detached group `name` that another driver started.

        Raises:
            ResourceError: no group with that name exists.
        """
        cluster.require_open()
        ranks, role = join_actors(cluster, name)
        group = cls.__new__(cls)
        group.role = role
        group.worker_class = worker_class
        group.world_size = len(ranks)
        group._cluster = cluster
        group._pool = None
        group._name = name
        group._restart_hooks = []
        group._mesh = None
        group._broken = None
        group._config = cluster.config
        group._ranks = ranks
        block_on(group._find_positions())
        return group

    def on_restart(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Register a hook that is awaited after each `restart`, for example to load a checkpoint or
        resend the weights. Hooks run in registration order.
        """
        self._restart_hooks.append(hook)

    async def restart(self) -> None:
        """Restart a group that has lost a rank or hangs: kill the remaining processes, start new
        ones in the same slots, and run the hooks.

        Raises:
            ResourceError: the group was joined; only the driver that started it can restart it.
            WorkerError: a rank did not start.
        """
        if self._pool is None:
            raise ResourceError(
                f"group {self._name!r} was joined; only the driver that started it can restart it"
            )
        self._cluster.require_open()
        self.kill()
        self._mesh = None
        self._broken = None
        await self._start(self._pool)
        for hook in self._restart_hooks:
            await hook()

    def is_alive(self) -> bool:
        """Return True if every rank's process is running and no call has marked the group as
        broken.

        A busy rank counts as alive.
        """
        import ray

        here = [rank for rank in self._ranks if rank.remote is None]
        if self._broken is not None or any(rank.pid and not is_running(rank.pid) for rank in here):
            return False
        asked = [rank.actor.identity.remote() for rank in self._ranks if rank.remote is not None]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_ALIVE_S) if asked else ([], [])
        try:
            ray.get(ready)
        except ray.exceptions.RayActorError:
            return False
        return True

    def run(
        self,
        method: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        only: Sequence[int] | None = None,
        role: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method from code outside an event loop, and wait for its result.

        A method registered with `blocking=False` returns a `Future` immediately. Arguments and
        errors are the same as for `call`.
        """
        future = self.call(method, *args, timeout=timeout, only=only, role=role, **kwargs)
        return future.result() if method_spec(method).blocking else future

    def call(
        self,
        method: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        only: Sequence[int] | None = None,
        role: str | None = None,
        **kwargs: Any,
    ) -> Future:
        """Call a method of the worker class on the group. Returns once the call has been sent to
        the ranks. Awaiting the future returns the result.

        Args:
            method: the function on the class, e.g. `PolicyWorker.compute_log_probs`.
            args, kwargs: distributed to the ranks as declared by `@register`.
            timeout: seconds; None for `cluster.config.call_timeout_s`.
            only: ranks to call, as if the group had no others; None for all.
            role: role to call in a `colocated` group; None for the only role that has the method.

        Raises:
            WorkerError: a rank died, raised an exception or did not reply in time.
            SchemaError: arguments or results do not match the method's declaration.
            HybridFlowError: a rank raised this error, which is re-raised with the same type.
        """
        spec = method_spec(method)
        address = self._address(method, role)
        if self._broken is not None:
            raise self._broken
        ranks = range(self.world_size) if only is None else only
        mesh = self._mesh if spec.needs_mesh else None
        if mesh is not None and only is not None:
            mesh = mesh.of(ranks)
        plan = plan_call(spec, len(ranks), mesh, args, kwargs)
        if only is not None:
            plan = plan.on(ranks)
        collectors: list[int] = []  # ranks whose batches stay in the store
        if spec.writes and spec.dispatch is Dispatch.ONE_TO_ALL:
            collectors = list(ranks)
        elif spec.writes and spec.dispatch is Dispatch.DP and mesh is not None:
            collectors = [ranks[rank] for rank in mesh.collectors]
        return self._launch(address, plan, timeout, spec.writes if collectors else (), collectors)

    def pids(self) -> list[int]:
        """Return the process ids in rank order. Each is valid only on its rank's node."""
        return [rank.pid for rank in self._ranks]

    def log_paths(self) -> list[Path]:
        """Return the log file of each rank."""
        return [rank.log_path for rank in self._ranks]

    def kill(self) -> None:
        """Kill all processes of the group immediately, including their children. Idempotent."""
        import ray

        ranks = self._ranks
        self._ranks = []
        lost = self._cluster.lost()
        if ray.is_initialized() and not lost:
            for rank in ranks:
                ray.kill(rank.actor, no_restart=True)
        self._broken = self._broken or WorkerError("the group was killed", role=self.role)
        here: list[int] = []
        there: dict[RemoteNode, list[int]] = {}
        for rank in ranks:
            on_node = here if rank.remote is None else there.setdefault(rank.remote, [])
            if rank.pid:
                on_node.append(rank.pid)
        end_processes(here, *([0.0] if lost else []))
        if not lost:
            for node, pids in there.items():
                node.end(pids)

    # --- private
    # ---------------------------------------------------------------------------------------------

    async def _start(self, pool: ResourcePool) -> None:
        """Start the actors and initialise the ranks. If one fails, all are killed."""
        self._ranks = start_actors(
            self._cluster, pool, self.role, self._log_dir, self._name, self._fork_server
        )
        try:
            await self._bring_up(pool)
        except BaseException:
            self.kill()
            raise

    async def _bring_up(self, pool: ResourcePool) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        slots = pool.slots
        infos: list[HostInfo] = await self._everywhere(
            "describe", [(slot.node, slot.ports) for slot in slots], deadline
        )
        for rank, info in zip(self._ranks, infos, strict=True):
            rank.pid = info.pid
        settings = []
        construction = []
        for r, (slot, info) in enumerate(zip(slots, infos, strict=True)):
            context = self._context(pool, r, infos)
            env = environment(context, placed_environment(slot, info, pool.gpus) | self._env)
            settings.append((self.role, context, env, import_path()))
            construction.append((self.worker_class, context, self._args))
        await self._everywhere("set_up", settings, deadline)
        await self._compare_clocks(infos, deadline)
        await self._everywhere("construct", construction, deadline)
        await self._find_positions()

    async def _compare_clocks(self, infos: Sequence[HostInfo], deadline: float) -> None:
        """Record how far other machines' clocks are ahead of this machine's."""
        file = spans.current()
        if file is None:
            return
        others = {info.boot: r for r, info in enumerate(infos) if info.boot != spans.boot_id()}
        for boot, first in others.items():
            measured = []
            for _ in range(_CLOCK_PROBES):
                before = spans.unix_time()
                refs = {first: self._ranks[first].actor.clock.remote()}
                left = max(0.0, deadline - time.monotonic())
                [there] = await self._future("clock", left, refs=refs, collect=in_rank_order)
                measured.append(spans.ahead(before, there, spans.unix_time()))
            ahead, within = min(measured, key=lambda one: one[1])
            for r, info in enumerate(infos):
                if info.boot == boot:
                    file.write({"clock": f"{self.role} rank {r}", "ahead": ahead, "within": within})

    async def _find_positions(self) -> None:
        """Query the ranks' data-parallel positions, if the class defines `mesh_position`."""
        if hasattr(self.worker_class, "mesh_position"):
            plan = plan_call(_MESH_SPEC, self.world_size, None, (), {})
            self._mesh = Mesh(tuple(await self._launch("mesh_position", plan, None)))

    def _context(self, pool: ResourcePool, rank: int, infos: Sequence[HostInfo]) -> WorkerContext:
        slot = pool.slots[rank]
        return WorkerContext(
            rank,
            self.world_size,
            slot.local_rank,
            pool.slots[0].node,
            infos[0].free_port,
            slot.node,
            self._ranks[rank].log_path,
            slot.ports,
        )

    def _everywhere(
        self, step: str, arguments: Sequence[tuple[Any, ...]], deadline: float
    ) -> Future:
        """Call one of the start-up methods of `Host` on all ranks, with a deadline."""
        refs = {}
        for r, rank in enumerate(self._ranks):
            refs[r] = getattr(rank.actor, step).remote(*arguments[r])
        name = "start-up" if step != "construct" else f"{self.worker_class.__name__}.__init__"
        left = max(0.0, deadline - time.monotonic())
        return self._future(name, left, refs=refs, collect=in_rank_order)

    def _launch(
        self,
        name: str,
        plan: CallPlan,
        timeout: float | None,
        writes: Sequence[str] = (),
        collectors: Sequence[int] = (),
    ) -> Future:
        """Send the calls to the ranks. The columns that the method writes stay in the object
        store.
        """
        # An object costs about a millisecond, so on a single node all columns of a rank share one.
        # On several nodes each column is a separate object, so that only columns that a call reads
        # are sent to another node.
        together = (tuple(writes),) if self._cluster.is_local else tuple((name,) for name in writes)
        sent: dict[int, Any] = {}  # stores each chunk once for all ranks of a data-parallel group
        # shares one message among ranks with equal arguments
        made: dict[int, tuple[Request, Sequence[Any]]] = {}
        refs: dict[int, Any] = {}
        stored: dict[int, dict[str, Any]] = {}
        for r, call in plan.calls.items():
            if id(call) not in made:
                made[id(call)] = _message(name, call, sent)
            request, objects = made[id(call)]
            rank = self._ranks[r]
            if not writes:
                refs[r] = rank.send("call", request.packed(), *objects)
            elif r in collectors:
                inline = INLINE_BYTES // len(collectors)
                storing = replace(request, together=together, inline_bytes=inline)
                refs[r], *held = rank.send(
                    "call_stored", storing.packed(), *objects, num_returns=1 + len(together)
                )
                stored[r] = {}
                for names, ref in zip(together, held, strict=True):
                    stored[r] |= dict.fromkeys(names, ref)
            else:
                refs[r] = rank.send("call_stored", request.packed(), *objects)
        wait = self._config.call_timeout_s if timeout is None else timeout
        on_lost = partial(self._note_loss, self._ranks)
        return self._future(
            name, wait, refs=refs, collect=plan.collect, on_lost=on_lost, stored=stored
        )

    def _future(self, name: str, wait_s: float, **call: Any) -> Future:
        ranks = list(self._ranks)
        check = self._cluster.require_open
        return Future(self.role, name, ranks=ranks, timeout_s=wait_s, check=check, **call)

    def _address(self, method: Callable[..., Any], role: str | None) -> str:
        try:
            return address_of(self.worker_class, method, role)
        except TypeError as error:
            raise TypeError(f"{self.role}: {error}") from None

    def _note_loss(self, ranks: list[Rank], error: HybridFlowError) -> None:
        """Mark the group as broken, unless `ranks` have been replaced in the meantime. After a rank
        has died or hung, the ranks are out of sync, so every later call would hang as well.
        """
        if ranks is self._ranks:
            self._broken = error


def _stored(value: Any, sent: dict[int, Any], key: int) -> Any:
    """Put the value into the object store, once per `key`, and return its reference."""
    import ray

    if key not in sent:
        sent[key] = ray.put(value)
    return sent[key]


def _message(name: str, call: RankCall, sent: dict[int, Any]) -> tuple[Request, Sequence[Any]]:
    """Build a rank's request, and the objects that are sent along with it."""
    outgoing = Outgoing()
    values = tuple(_encoded(value, sent, outgoing) for value in (*call.args, *call.kwargs.values()))
    return Request(name, values, tuple(call.kwargs)), outgoing.objects


def _encoded(value: Any, sent: dict[int, Any], outgoing: Outgoing) -> Any:
    """Encode one argument of a call.

    A small value is sent inline, a batch with stored columns becomes a recipe, and anything else
    becomes the position of an object sent along.
    """
    if isinstance(value, DataProto) and value.deferred:
        return outgoing.recipe(value, lambda local: _stored(local, sent, id(value)))
    return value if is_small(value) else At(outgoing.add(_stored(value, sent, id(value))))
