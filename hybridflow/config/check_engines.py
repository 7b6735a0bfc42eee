"""Checks of a built-in engine's settings, on their own and against the model's sizes. Does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.config import derived
from hybridflow.config.engine_arguments import refusals
from hybridflow.config.keys import ENGINE, differing
from hybridflow.config.schema import RolloutConfig, RunConfig


def shape_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each engine setting that is invalid with any model."""
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
            f"rollout.quantization=fp8 requires model.dtype=bfloat16, got {config.model.dtype}: "
            "the engine's fp8 layers support no other activations"
        )
    if rollout.pipeline > 1 and rollout.sync.pause != "abort":
        # sglang/srt/managers/scheduler_pp_mixin.py:129
        yield (
            f"rollout.pipeline={rollout.pipeline} requires rollout.sync.pause=abort, got "
            f"{rollout.sync.pause}: the engine's pipeline loop ignores a pause, so paused requests "
            "would continue while new weights arrive"
        )


def _node_problems(config: RunConfig) -> Iterator[str]:
    """Check that each node runs only whole stages, or each stage occupies only whole nodes, as
    SGLang requires (sglang/srt/entrypoints/engine.py:2062)."""
    rollout = config.rollout
    nodes = config.rollout.nodes_per_engine
    ranks = derived.engine_ranks(config)
    product = (
        f"rollout.tensor={rollout.tensor} x rollout.pipeline={rollout.pipeline} = {ranks} ranks"
    )
    if ranks % nodes:
        yield (
            f"rollout.nodes_per_engine={nodes} does not divide an engine's {product}; choose a "
            f"divisor of {ranks}"
        )
    elif nodes % rollout.pipeline and rollout.pipeline % nodes:
        yield (
            f"rollout.nodes_per_engine={nodes} and rollout.pipeline={rollout.pipeline}: one must "
            "divide the other, because a node must run whole stages, or a stage must occupy whole "
            "nodes"
        )


def _open_doors(config: RunConfig) -> Iterator[str]:
    """Yield the settings that would expose an engine to other users of the machine or network."""
    rollout = config.rollout
    cluster = config.cluster
    if rollout.nodes_per_engine > 1 and not derived.engines_may_span_nodes(config):
        yield (
            f"rollout.nodes_per_engine={rollout.nodes_per_engine} in the cluster at "
            f"{cluster.address}: an engine's ranks unpickle data from unauthenticated connections "
            "(docs/security.md); set cluster.trusted_network=true if no other user can reach its "
            "machines, or rollout.nodes_per_engine=1"
        )


def size_problems(rollout: RolloutConfig, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each model size (in the HF config) that cannot be divided evenly across
    the engine's ranks. The vocabulary size may be arbitrary, because the vocabulary is padded.
    """
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
                f"{text} does not divide the {shared} columns of the model's shared experts; "
                f"choose a divisor of {shared}"
            )
    elif expert > 1:
        yield (
            f"rollout.expert={expert} requires a mixture of experts, but the model has none; set "
            "it to 1"
        )
    if derived.has_dense_mlps(sizes):
        cuts.append(("intermediate_size", tensor, text))
    for name, parts, key in cuts:
        size = sizes.get(name)
        if isinstance(size, int) and size % parts:
            yield (
                f"the model's {name}={size} cannot be divided evenly by {key}; choose a divisor of "
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
            f"the model's num_key_value_heads={heads} and {text}{copies}: one must divide the other"
        )


def drafting_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that are incompatible with `rollout.speculative`."""
    rollout = config.rollout
    if rollout.speculative.method is None:
        return
    key = f"rollout.speculative.method={rollout.speculative.method}"
    if not config.actor.mtp.train:
        yield (
            f"{key} requires actor.mtp.train=true, because syncs send only heads that are trained; "
            "set it to true, or rollout.speculative.method=null"
        )
    wanted = {
        "rollout.engine": RolloutConfig.engine,  # the default: others do not draft
        "rollout.pipeline": 1,
        "rollout.data_parallel_attention": 1,
        "rollout.quantization": None,
    }
    for name, value, needed in differing(config, wanted):
        yield f"{key} requires {name}={'null' if needed is None else needed}, got {value}"
    if derived.needs_engine_routes(config):
        yield (
            f"{key} does not record the experts that tokens are routed to, as required by "
            f"actor.router_replay={config.actor.router_replay}; change one of the two"
        )
    for section, sampling in (
        ("sampling", rollout.sampling),
        ("val_sampling", rollout.val_sampling),
    ):
        plain = type(sampling)()
        names = ["frequency_penalty", "presence_penalty", "repetition_penalty"]
        names += ["top_p", "top_k", "min_p"] if section == "sampling" else []
        changed = [n for n in names if getattr(sampling, n) != getattr(plain, n)]
        if changed:
            yield (
                f"{key} does not support rollout.{section}.{changed[0]}="
                f"{getattr(sampling, changed[0])}: drafts are verified against the whole "
                f"distribution; set it to {getattr(plain, changed[0])}"
            )
