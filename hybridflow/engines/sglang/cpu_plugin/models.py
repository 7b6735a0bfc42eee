"""Torch paths for models whose SGLang code assumes a GPU or SGLang's own CPU kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

_MODELS = "sglang.srt.models"


def hooks() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield (target, hook, name of the `HookType`) for the models that this process may serve.

    A hook imports its model's file. Models whose files the server skips
    (`server.unused_model_files`) therefore get no hook.
    """
    skipped = os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(",")
    for file, member, hook, kind in (
        ("gpt_oss", "GptOssAttention.__init__", keep_dtype_of_sinks, "AFTER"),
        ("minimax_m2", "MiniMaxM2QKRMSNorm._forward_naive", normalise_heads, "REPLACE"),
        ("qwen2_moe", "fused_gate_sigmoid_mul", gate_shared, "REPLACE"),
        ("qwen2_moe", "fused_gate_sigmoid_mul_add", add_gated_shared, "REPLACE"),
        ("ernie4", "Ernie4Moe.__init__", flatten_expert_bias, "AFTER"),
        ("glm4_moe", "Glm4MoeForCausalLM.set_embed_and_head", share_ends, "REPLACE"),
        ("glm4_moe_lite", "Glm4MoeLiteForCausalLM.set_embed_and_head", share_ends, "REPLACE"),
        ("deepseek_v2", "DeepseekV2ForCausalLM.set_embed_and_head", share_ends, "REPLACE"),
    ):
        if file not in skipped:
            yield f"{_MODELS}.{file}.{member}", hook, kind


def keep_dtype_of_sinks(_: Any, attention: Any, *__: Any, **___: Any) -> None:
    """Store gpt-oss's sinks in the model's dtype. SGLang stores them in bfloat16 for every backend
    but one (sglang/srt/models/gpt_oss.py:410), which would round float32 weights."""
    import torch

    dtype = attention.qkv_proj.weight.dtype
    attention.sinks = torch.nn.Parameter(attention.sinks.data.to(dtype), requires_grad=False)


def normalise_heads(norm: Any, q: Any, k: Any) -> tuple[Any, Any]:
    """Apply MiniMax-M2's two norms, one across all query heads and one across all key heads. The
    heads are sharded across ranks.

    Replaces two CUDA kernels (sglang/srt/models/minimax_m2.py:437). The ranks exchange sums of
    squares.
    """
    import torch
    from sglang.srt.models import minimax_m2

    wide = [x.float() for x in (q, k)]
    means = torch.stack([x.square().mean(-1) for x in wide], dim=-1)
    if norm._world_size > 1:
        means = minimax_m2.attn_tp_all_reduce(means) / norm._world_size
    scales = (means + norm._eps).rsqrt()
    q_out, k_out = (
        (x * scales[:, number, None] * weight.float()).to(q.dtype)
        for number, (x, weight) in enumerate(
            zip(wide, (norm._q_norm.weight, norm._k_norm.weight), strict=True)
        )
    )
    return q_out, k_out


def flatten_expert_bias(_: Any, block: Any, *__: Any, **___: Any) -> None:
    """Replace the bias `[1, experts]` that ERNIE's router uses with a view `[experts]`, as SGLang
    does for its own CPU engine (sglang/srt/models/ernie4.py:83)."""
    config = block.topk.topk_config
    config.correction_bias = block.gate.e_score_correction_bias.data.squeeze(0)


def gate_shared(hidden: Any, gate: Any, shared: Any) -> Any:
    """Return the output of Qwen2-MoE's shared expert, scaled by its gate. Replaces a Triton kernel
    (sglang/kernels/ops/elementwise/elementwise.py:253).
    """
    return (hidden.float() @ gate.float()).sigmoid()[:, None].to(shared.dtype) * shared


def add_gated_shared(hidden: Any, gate: Any, shared: Any, total: Any) -> None:
    """Add the gated output of Qwen2-MoE's shared expert to the output of the routed experts.
    Replaces a Triton kernel.
    """
    total += gate_shared(hidden, gate, shared)


def share_ends(draft: Any, embedding: Any, head: Any) -> None:
    """Make a draft model share the embedding and the output layer of the main model. Skips the CUDA
    synchronisation (sglang/srt/models/glm4_moe.py:1253).
    """
    del draft.model.embed_tokens.weight
    del draft.lm_head.weight
    draft.model.embed_tokens.weight = embedding
    draft.lm_head.weight = head
