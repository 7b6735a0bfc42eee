"""Startup of a worker group's actor processes, and lookup of a detached group's processes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hybridflow.dispatch import WorkerContext
from hybridflow.errors import ResourceError
from hybridflow.process import fork_client, secret
from hybridflow.process.private_folder import compiled_code
from hybridflow.single_controller.cluster import Cluster
from hybridflow.single_controller.future import Rank
from hybridflow.single_controller.host import Host, HostInfo, Identity
from hybridflow.single_controller.resource_pool import ResourcePool, Slot

NAMESPACE = "hybridflow"  # shared by detached groups; any other driver has a private namespace
_PINNED = "pinned_max_round_threshold_mb"  # option in PYTORCH_ALLOC_CONF


def start_actors(
    cluster: Cluster,
    pool: ResourcePool,
    role: str,
    log_dir: Path,
    name: str | None,
    fork_server: str = "",
) -> list[Rank]:
    """Start one actor in each slot of the pool. Returns the ranks in slot order.

    If `name` is given, the actors are detached and outlive the driver; raises ResourceError if the
    name is taken. If `fork_server` is given, their processes are forked from that server
    (`process.fork_server`).
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = round(1.0 / pool.max_colocate, 4)
    host = ray.remote(Host)
    # py_executable is Ray's supported setting for how a worker process is launched
    python = shlex.join([sys.executable, "-I", "-S", fork_client.__file__, fork_server])
    environment = {"runtime_env": {"py_executable": python}} if fork_server else {}
    nodes = {node: cluster.processes_of(node) for node in set(pool.nodes)}
    ranks = []
    for r, slot in enumerate(pool.slots):
        known = (
            {"name": f"{name}:{r}", "namespace": NAMESPACE, "lifetime": "detached"} if name else {}
        )
        options = host.options(
            **known,
            **environment,
            # no num_gpus: the bundle holds the GPUs, and each process gets an explicit list
            num_cpus=share,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                slot.placement_group, placement_group_bundle_index=slot.bundle_index
            ),
        )
        try:
            actor = options.remote()
        except ValueError as error:  # raised by Ray if the name is taken
            raise ResourceError(
                f"detached group {name!r} already exists; join it, or choose another name"
            ) from error
        log = log_dir / f"{role}-rank{r}.log"
        ranks.append(
            Rank(
                actor,
                slot.node,
                log,
                nodes[slot.node],
                log_from=log.stat().st_size if log.exists() else 0,
            )
        )
    return ranks


def join_actors(cluster: Cluster, name: str) -> tuple[list[Rank], str]:
    """Return the ranks of the detached group `name`, and its role. Raises ResourceError if there is
    no such group."""
    import ray

    try:
        first = ray.get_actor(f"{name}:0", NAMESPACE)
        known: Identity = ray.get(first.identity.remote(), timeout=cluster.config.start_timeout_s)
        actors = [first]
        for r in range(1, known.world_size):
            actors.append(ray.get_actor(f"{name}:{r}", NAMESPACE))
        found: list[Identity] = ray.get(
            [actor.identity.remote() for actor in actors], timeout=cluster.config.start_timeout_s
        )
    except (ValueError, ray.exceptions.RayError) as error:
        raise ResourceError(
            f"detached group {name!r} not found: {str(error).strip().splitlines()[0]}"
        ) from error
    processes_of = cache(cluster.processes_of)
    ranks = []
    for actor, one in zip(actors, found, strict=True):
        ranks.append(Rank(actor, one.node, one.log_path, processes_of(one.node), one.pid))
    return ranks, known.role


def placed_environment(slot: Slot, info: HostInfo, gpus: bool) -> dict[str, str]:
    """Return the environment variables that bind a process to its slot: device type, visible
    devices, and the network interface with the node's address. If the interface were not set, gloo
    would listen on the address to which the host name resolves.
    """
    env = {"HYBRIDFLOW_PLATFORM": "cuda" if gpus else "cpu"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
        env["PYTORCH_ALLOC_CONF"] = _pinned_settings(os.environ)
    return env | ({"GLOO_SOCKET_IFNAME": info.interface} if info.interface else {})


def _pinned_settings(user: Mapping[str, str]) -> str:
    """Return the user's allocator settings, extended so that pinned blocks over 128 MB are not
    rounded up. By default, torch rounds pinned blocks, which offloaded weights and checkpoints use,
    up to a power of two (CachingHostAllocator.h:303).
    """
    settings = user.get("PYTORCH_ALLOC_CONF") or user.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if _PINNED in settings:
        return settings
    return ",".join(filter(None, (settings, f"{_PINNED}:128")))


def environment(context: WorkerContext, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that torch.distributed reads, and those that limit each
    process to one thread. `extra` overrides both.
    """
    env = {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank),
        "MASTER_ADDR": context.master_addr,
        "MASTER_PORT": str(context.master_port),
        "OMP_NUM_THREADS": "1",
        secret.VARIABLE: secret.job_secret(),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compiled_code(),
    }
    if context.master_addr in ("127.0.0.1", "::1"):
        # by default gloo listens on the interface that the host name resolves to
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return {**env, **extra}
