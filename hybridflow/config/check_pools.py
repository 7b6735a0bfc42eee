"""Which sections share devices. Part of `config.check`; whether they fit a cluster is `placement`'s."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig


def problems(config: RunConfig, job: str) -> Iterator[str]:
    """Pools that no section makes, and keys about them that would not count."""
    roles = derived.roles_in_use(config, job)[1:]
    apart = [*(role for role in roles if not derived.is_colocated(config, role)), *(["rollout"] * (job == "train"))]
    makers = ["actor", *(name for name in apart if getattr(config, name).pool is None)]
    for name in (role for role in roles if role not in apart):
        if getattr(config, name).pool is not None or getattr(config, name).packing != "pack":
            yield (
                f"{name}.pool and {name}.packing are about processes of its own, but {name}.placement=colocated; "
                f"remove them, or set {name}.placement=own"
            )
    for name in apart:
        pool, packing = getattr(config, name).pool, getattr(config, name).packing
        if pool is not None and pool not in makers:
            yield (
                f"{name}.pool={pool}: that section has no devices of its own in this run; choose one of "
                f"{', '.join(makers)}, or null"
            )
        elif pool is not None and packing != "pack":
            yield (
                f"{name}.packing={packing} does not count with {name}.pool={pool}, whose devices lie as {pool} has "
                f"them; remove it, or set {name}.pool=null"
            )
