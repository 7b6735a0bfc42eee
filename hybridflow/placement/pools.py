"""The device pools of a configuration, and the processes that share each pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridflow.config import derived
from hybridflow.config.schema import Packing, RunConfig
from hybridflow.device.platform import Kind


@dataclass(frozen=True)
class Group:
    """Identical members of a role: the ranks of a trained model, or the engines.

    Args:
        role: `actor`, `critic`, `reference`, `reward_model`, `teacher` or `rollout`; for an
            additional policy, NAME and NAME.rollout.
        count: number of ranks or engines.
        devices: number of devices per member and node. They are consecutive.
        nodes: number of distinct nodes per member, with `devices` on each.
    """

    role: str
    count: int
    devices: int = 1
    nodes: int = 1

    @property
    def is_engine(self) -> bool:
        """True if the members are engines."""
        return is_engine(self.role)


@dataclass(frozen=True)
class Pool:
    """Devices that the members of the pool's groups use in turn.

    Args:
        name: configuration section that defines the pool.
        groups: the groups that run in the pool. Members of one group never share a device; members
            of different groups do.
        packing: distribution over nodes. `pack` uses few nodes, `spread` uses all nodes evenly, and
            `whole_nodes` uses few nodes that no other pool uses.
        shape: number of nodes and devices per node. None means as many devices as the largest group
            needs.
    """

    name: str
    groups: tuple[Group, ...]
    packing: Packing = "pack"
    shape: tuple[int, int] | None = None


def pools_of(config: RunConfig, job: str = "train", kind: Kind = "cuda") -> tuple[Pool, ...]:
    """Return the device pools for a validated configuration, starting with the actor's.

    With `kind` cuda, an engine uses one GPU per rank. With cpu, it counts as one process per node.
    """
    groups = []
    for role in derived.roles_in_use(config, job):
        if role == "actor" or not _is_guest(config, role):
            groups.append(Group(role, derived.role_world_size(config, role)))
    if job == "train" and derived.generates(config):
        nodes = config.rollout.nodes_per_engine
        ranks = derived.engine_ranks(config) // nodes if kind == "cuda" else 1
        groups.append(Group("rollout", config.rollout.num_engines, ranks, nodes))
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(derived.pool_of(config, group.role), []).append(group)
    actor = (config.cluster.nodes, config.cluster.procs_per_node)
    pools = []
    for name, sharing in members.items():
        if name == "actor":
            pools.append(Pool(name, tuple(sharing), "pack", actor))
        else:
            pools.append(Pool(name, tuple(sharing), getattr(config, name).packing))
    if job == "train":
        for name in config.roles:
            own = pools_of(derived.policy_view(config, name), job, kind)
            pools += _pools_of_policy(name, own, config.roles[name].base is not None)
    return tuple(pools)


def is_engine(role: str) -> bool:
    """Return True if the role's members are engines, including those of an additional policy."""
    return role.rpartition(".")[2] == "rollout"


def policy_pool(name: str, section: str) -> str:
    """Return the name of a pool that belongs to the additional policy `roles.NAME`."""
    return name if section == "actor" else f"{name}.{section}"


def _pools_of_policy(name: str, pools: tuple[Pool, ...], has_base: bool) -> list[Pool]:
    """Return an additional policy's pools, with names derived from the policy's. Its ranks need not
    fill whole nodes; a policy with a base uses the first policy's ranks."""
    renamed = []
    for pool in pools:
        if has_base and pool.name == "actor":
            continue
        groups = [replace(group, role=policy_pool(name, group.role)) for group in pool.groups]
        renamed.append(Pool(policy_pool(name, pool.name), tuple(groups), pool.packing))
    return renamed


def _is_guest(config: RunConfig, role: str) -> bool:
    """Return True if a role runs in the actor's processes."""
    return role != "actor" and derived.is_colocated(config, role)
