"""Implementation of `hybridflow reshard plan`: plans, proves and simulates a transfer for given
sizes, and formats the results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.config.model_config import read_model_config
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models import family_of
from hybridflow.models.decoder import Decoder
from hybridflow.models.fp8 import FP8, BlockQuantisation
from hybridflow.models.layout import ParallelShape
from hybridflow.models.published import published
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.reshard.proof import Proof, prove
from hybridflow.reshard.simulate import Fabric, Simulation, simulate
from hybridflow.reshard.slices import SlicePlan

SHORT = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
}
SHORT |= {"dpa": "data_attention", "first": "first_stage_layers", "last": "last_stage_layers"}
SHORT["layers"] = "layers_per_stage"


@dataclass(frozen=True)
class DryRun:
    """Results of a dry run. `plan_s` (including layouts), `proof_s` and `simulate_s` are durations
    in seconds."""

    plan: SlicePlan
    proof: Proof
    simulation: Simulation
    plan_s: float
    proof_s: float
    simulate_s: float

    def figures(self) -> dict[str, Any]:
        """Return all results as plain data."""
        plan = self.plan
        return {
            "plan_hash": self.proof.digest,
            "parameters": int(
                np.delete(plan.catalog.shapes, plan.catalog.scales[:, 1], axis=0).prod(axis=1).sum()
            ),
            "trainer_ranks": plan.source.num_ranks,
            "engine_ranks": plan.target.num_ranks,
            "engines": int(plan.target.replica.max()) + 1,
            "slices": self.proof.slices,
            "sends": len(plan.sends.source),
            "buckets": int(plan.deliveries.bucket.max(initial=-1)) + 1,
            "unused": list(self.proof.unused),
            "conversions": list(map(list, plan.conversions)),
            **self.simulation.figures(),
            "plan_s": self.plan_s,
            "proof_s": self.proof_s,
            "simulate_s": self.simulate_s,
        }


def parse_shape(text: str) -> dict[str, Any]:
    """Parse `tp=8,pp=3,layers=3+4+2` or `32xtp=32,ep=32` into keyword arguments. The leading number
    is `count`.

    Raises:
        ConfigError: a term is neither NAME=NUMBER nor layers=NUMBER+NUMBER.
    """
    count, found, rest = text.partition("x")
    values: dict[str, Any] = {"count": int(count)} if found and count.isdigit() else {}
    for word in (rest if values else text).split(","):
        name, _, number = word.strip().partition("=")
        if name == "layers" and all(part.isdigit() for part in number.split("+")):
            values["layers_per_stage"] = tuple(map(int, number.split("+")))
            continue
        if not number.isdigit() or int(number) < (0 if name in ("first", "last") else 1):
            raise ConfigError(
                f"{word!r} in {text!r}: expected NAME=NUMBER, for example tp=8,pp=4; valid names: "
                f"{', '.join(SHORT)}, ranks"
            )
        values[SHORT.get(name, name)] = int(number)
    return values


def build(kind: type, text: str) -> Any:
    """Parse `text` as a ParallelShape or EngineShape.

    Raises:
        ConfigError: a name is not valid on this side, or the number of ranks is missing.
    """
    values = parse_shape(text)
    known = {field.name for field in fields(kind)}
    unknown = sorted(values.keys() - known)
    if unknown or (kind is ParallelShape and "ranks" not in values):
        names = sorted(
            {short for short, long in SHORT.items() if long in known}
            | (known & {"ranks", "count", "dense"})
        )
        problem = (
            f"{unknown[0]!r} is not a size that this option accepts"
            if unknown
            else "ranks=NUMBER is missing"
        )
        raise ConfigError(f"{text!r}: {problem}; valid names: {', '.join(names)}")
    return kind(**values)


def dry_run(
    config: Mapping[str, Any],
    trainer: ParallelShape,
    engines: Sequence[EngineShape],
    dtype: str,
    staging_bytes: int,
    fabric: Fabric,
    engine_dtype: str | None = None,
) -> DryRun:
    """Plan, prove and simulate.

    Args:
        dtype: dtype of the trainer's weights.
        engine_dtype: dtype of the engines' weights, if different. FP8 is block-wise, with blocks as
            specified in the config's `quantization_config` or of 128 x 128 by default. Other
            tensors stay in `dtype`.

    Raises:
        ConfigError, ModelError, WeightSyncError: the model or the sizes do not fit. The message
            includes the remedy.
    """
    decoder = family_of(config)
    if not isinstance(decoder, Decoder):
        raise ConfigError(
            f"model_type {config.get('model_type')!r} is not supported: it has no engine layout"
        )
    times = [time.perf_counter()]
    quantisation = BlockQuantisation.of(config) if engine_dtype == FP8 else None
    catalog = Catalog.of(decoder.tensors(), quantisation)
    source = megatron_layout(decoder, trainer.coordinates(), dtype, catalog)
    plain = dtype if quantisation else engine_dtype or dtype
    plan = make_plan(
        catalog,
        source,
        engine_layout(decoder, engines, plain, catalog, quantisation),
        staging_bytes,
    )
    times.append(time.perf_counter())
    proof = prove(plan)
    times.append(time.perf_counter())
    simulation = simulate(plan, fabric)
    times.append(time.perf_counter())
    plan_s, proof_s, simulate_s = (b - a for a, b in pairwise(times))
    return DryRun(plan, proof, simulation, plan_s, proof_s, simulate_s)


def table(run: DryRun) -> str:
    """Format the results as a text table."""
    f = run.figures()
    gb = 1e9
    rows = [
        ("parameters", f"{f['parameters'] / 1e9:,.1f} billion"),
        (
            "ranks",
            (
                f"{f['trainer_ranks']:,} trainer, {f['engine_ranks']:,} engine ({f['engines']} "
                "engines)"
            ),
        ),
        ("slices", f"{f['slices']:,} in {f['buckets']} buckets, {f['messages']:,} messages"),
        ("bytes on the wire", f"{f['wire_bytes'] / gb:,.2f} GB, each byte sent once"),
        ("casts", ", ".join(f"{a} to {b}" for a, b in f["conversions"]) or "none"),
        (
            "bytes per sender link",
            f"{f['sender_bytes_min'] / gb:,.3f} to {f['sender_bytes_max'] / gb:,.3f} GB",
        ),
        ("bytes per receiver link", f"up to {f['receiver_bytes_max'] / gb:,.3f} GB"),
        (
            "hottest link",
            (
                f"{f['hottest_link_bytes'] / gb:,.3f} GB, {f['hottest_link_ratio']:.3f} x the "
                "lower bound"
            ),
        ),
        (
            "peak staging",
            (
                f"{f['sender_staging_bytes'] / 2**20:,.0f} MiB per sender, "
                f"{f['receiver_staging_bytes'] / 2**20:,.0f} MiB per receiver"
            ),
        ),
        (
            "predicted time",
            (
                f"{f['seconds']:,.3f} s, {100 * f['wire_share']:.1f}% of the wire bound "
                f"({f['wire_bound_s']:,.3f} s)"
            ),
        ),
        ("time to copy a staged shard into place", f"{f['commit_s']:,.3f} s"),
        ("proof", f"every engine element written once; {len(f['unused'])} tensors unused"),
        ("plan", f"{f['plan_hash'][:16]}, made in {f['plan_s']:.1f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def read_config(model: str) -> dict[str, Any]:
    """Load an HF config. `model` is the name of a published model, a folder with a config.json, or
    a file.

    Raises:
        ModelError: `model` is neither a known name nor a file.
    """

    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            return read_model_config(file)
        except ValueError as error:
            raise ModelError(f"{file} is {error}") from error
    return published(model)
