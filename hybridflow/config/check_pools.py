"""Which sections share devices. Part of `config.check`; whether they fit a cluster is `placement`'s."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig


def problems(config: RunConfig, job: str) -> Iterator[str]:
    """Pools that no section makes, and keys about them that would not count."""
    if job != "train":
        return
    in_use = [role for role in derived.roles_in_use(config) if role == "actor" or not derived.is_colocated(config, role)]
    makers = [name for name in (*in_use, "rollout") if name == "actor" or getattr(config, name).pool is None]
    for name in ("rollout", *derived.roles_in_use(config)[1:]):
        section = getattr(config, name)
        if name != "rollout" and derived.is_colocated(config, name):
            if section.pool is not None or section.packing != "pack":
                yield (
                    f"{name}.pool and {name}.packing are about processes of its own, but {name}.placement=colocated; "
                    f"remove them, or set {name}.placement=own"
                )
            continue
        if section.pool is not None and section.pool not in makers:
            yield (
                f"{name}.pool={section.pool}: that section has no devices of its own in this run; choose one of "
                f"{', '.join(makers)}, or null"
            )
        elif section.pool is not None and section.packing != "pack":
            yield (
                f"{name}.packing={section.packing} does not count with {name}.pool={section.pool}, whose devices lie "
                f"as {section.pool} has them; remove it, or set {name}.pool=null"
            )


def _is_guest(config: RunConfig, role: str) -> bool:
    return derived.is_colocated(config, role)
