"""Checks of an engine's shape, by itself and against the model's sizes, for the built-in kind.
Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.config import derived
from hybridflow.config.engine_arguments import refusals
from hybridflow.config.keys import ENGINE
from hybridflow.config.schema import RolloutConfig, RunConfig


def shape_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems that no model could run with."""
    rollout = config.rollout
    for key in ("expert", "data_parallel_attention"):
        if rollout.tensor % (size := getattr(rollout, key)):
            yield (
                f"rollout.{key}={size} does not divide rollout.tensor={rollout.tensor}: it groups "
                f"an engine's tensor-parallel ranks; choose a divisor of {rollout.tensor}, or "
                "raise rollout.tensor"
            )
    yield from _node_problems(config)
    for name, why in refusals(rollout.extra_args) if rollout.engine in ENGINE.names() else ():
        yield f"rollout.extra_args.{name}={rollout.extra_args[name]!r}: {why}"
    yield from _open_doors(config)
    if rollout.quantization == "fp8" and config.model.dtype != "bfloat16":
        # sglang/srt/layers/quantization/fp8.py:326
        yield (
            f"rollout.quantization=fp8 needs model.dtype=bfloat16, not {config.model.dtype}: the "
            "engine's fp8 layers take no other activations"
        )
    if rollout.pipeline > 1 and rollout.sync.pause != "abort":
        # sglang/srt/managers/scheduler_pp_mixin.py:129
        yield (
            f"rollout.pipeline={rollout.pipeline} needs rollout.sync.pause=abort, not "
            f"{rollout.sync.pause}: the engine's pipeline loop does not look at a pause, so "
            "requests that only wait would go on amid new weights"
        )


def _node_problems(config: RunConfig) -> Iterator[str]:
    """Check that every node has whole stages, or every stage whole nodes, as SGLang requires
    (sglang/srt/entrypoints/engine.py:2062)."""
    rollout = config.rollout
    nodes = config.rollout.nodes_per_engine
    ranks = derived.engine_ranks(config)
    product = (
        f"rollout.tensor={rollout.tensor} x rollout.pipeline={rollout.pipeline} = {ranks} ranks"
    )
    if ranks % nodes:
        yield (
            f"rollout.nodes_per_engine={nodes} does not divide {product} of an engine; choose a "
            f"divisor of {ranks}"
        )
    elif nodes % rollout.pipeline and rollout.pipeline % nodes:
        yield (
            f"rollout.nodes_per_engine={nodes} and rollout.pipeline={rollout.pipeline}: one must "
            "divide the other, because a node holds whole stages or a stage whole nodes"
        )


def _open_doors(config: RunConfig) -> Iterator[str]:
    """Yield settings with which others on the machine or network could reach an engine."""
    rollout = config.rollout
    cluster = config.cluster
    if rollout.nodes_per_engine > 1 and not derived.engines_may_span_nodes(config):
        yield (
            f"rollout.nodes_per_engine={rollout.nodes_per_engine} in the cluster at "
            f"{cluster.address}: the ranks of one engine unpickle what comes over connections that "
            "prove nothing (docs/security.md); set cluster.trusted_network=true if nobody else can "
            "send to its machines, or rollout.nodes_per_engine=1"
        )


def size_problems(rollout: RolloutConfig, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes of the model (its HF config) that are not divisible over the engine's ranks. The
    vocabulary is padded, so it is unrestricted."""
    tensor = rollout.tensor
    expert = rollout.expert
    experts = derived.num_experts(sizes)
    attention = tensor // rollout.data_parallel_attention
    text = f"rollout.tensor={tensor}"
    copies = (
        f" / data_parallel_attention={rollout.data_parallel_attention}"
        if rollout.data_parallel_attention > 1
        else ""
    )
    cuts = [
        ("num_hidden_layers", rollout.pipeline, f"rollout.pipeline={rollout.pipeline}"),
        ("num_attention_heads", attention, text + copies),
    ]
    if experts:
        per_expert = text + (f" / expert={expert}" if expert > 1 else "")
        width = "intermediate_size" if sizes.get("num_local_experts") else "moe_intermediate_size"
        cuts.append((width, tensor // expert, per_expert))
        if experts % expert:
            yield (
                f"the model's {experts} experts cannot be divided evenly by "
                f"rollout.expert={expert}; choose a divisor of {experts}"
            )
        if (shared := derived.shared_expert_size(sizes)) % tensor:
            yield (
                f"the model's shared experts have {shared} columns, which {text} does not divide; "
                f"choose a divisor of {shared}"
            )
    elif expert > 1:
        yield (
            f"rollout.expert={expert} needs a mixture of experts, but the model has none; set it "
            "to 1"
        )
    if derived.has_dense_mlps(sizes):
        cuts.append(("intermediate_size", tensor, text))
    for name, parts, key in cuts:
        size = sizes.get(name)
        if isinstance(size, int) and size % parts:
            yield (
                f"{name}={size} of the model cannot be cut evenly by {key}; choose a divisor of "
                f"{size}"
            )
    heads = sizes.get("num_key_value_heads")
    if (
        isinstance(heads, int)
        and not sizes.get("kv_lora_rank")
        and heads % attention
        and attention % heads
    ):
        yield (
            f"num_key_value_heads={heads} of the model and {text}{copies}: one must divide the "
            "other"
        )
