"""The pools of devices that a configuration asks for, and the processes that share each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybridflow.config import derived
from hybridflow.config.schema import Packing, RunConfig


@dataclass(frozen=True)
class Group:
    """Equal members of a role: the ranks of a trained model, or the engines.

    Args:
        role: `actor`, `critic`, `reference`, `reward_model`, `teacher` or `rollout`.
        count: ranks, or engines.
        devices: of one member on one node; they are consecutive.
        nodes: different nodes that one member lies on, with `devices` on each.
    """

    role: str
    count: int
    devices: int = 1
    nodes: int = 1


@dataclass(frozen=True)
class Pool:
    """Devices that the members of some groups use in turns.

    Args:
        name: section of the configuration that makes the pool.
        groups: who runs there; members of one group never share a device, members of different groups do.
        packing: how the devices lie on the nodes. pack: on few nodes; spread: evenly over all nodes; whole_nodes: on
            few nodes that no other pool uses.
        shape: nodes and devices on each; None: as many as the largest group needs.
    """

    name: str
    groups: tuple[Group, ...]
    packing: Packing = "pack"
    shape: tuple[int, int] | None = None


def pools_of(
    config: RunConfig,
    roles: Sequence[str] | None = None,
    *,
    engines: bool = True,
    kind: Literal["cpu", "cuda"] = "cuda",
) -> tuple[Pool, ...]:
    """The pools of a run, those of fixed shape first.

    Args:
        config: a checked configuration.
        roles: the roles that a job starts; None: all that `hybridflow train` starts.
        engines: whether the job has engines.
        kind: on `cuda` an engine takes a GPU for each of its ranks; on `cpu` it counts as one process a node.
    """
    roles = derived.roles_in_use(config) if roles is None else roles
    groups = [Group(role, derived.role_world_size(config, role)) for role in roles if _has_processes(config, role)]
    if engines:
        nodes = config.rollout.nodes_per_engine
        ranks = derived.engine_ranks(config) // nodes if kind == "cuda" else 1
        groups.append(Group("rollout", config.rollout.num_engines, ranks, nodes))
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(derived.pool_of(config, group.role), []).append(group)
    actor = (config.cluster.nodes, config.cluster.procs_per_node)
    return tuple(
        Pool(name, tuple(sharing), *(("pack", actor) if name == "actor" else (getattr(config, name).packing,)))
        for name, sharing in members.items()
    )


def _has_processes(config: RunConfig, role: str) -> bool:
    return role == "actor" or not derived.is_colocated(config, role)
