"""General SGLang plugin (entry point group `sglang.srt.plugins`): small fixes for code paths that
upstream only runs on accelerators."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

from hybridflow.engines.sglang import cpu_plugin
from hybridflow.engines.sglang.cpu_plugin import models
from hybridflow.engines.sglang.images import receive_images
from hybridflow.engines.sglang.server_changes import close_paths, close_sockets, pack_answers


def register() -> None:
    """Register all hooks. Entry point, called once in every SGLang process by `load_plugins()`."""
    leave_out_megatron()
    keep_loads_in_folder()
    close_sockets()
    close_paths()
    pack_answers()
    receive_images()
    if not cpu_plugin.wanted():
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hybridflow.engines.sglang.cpu_plugin.attention import create_batched_attention

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_host_buffer
    # SGLang chooses "triton" for gpt-oss and OLMo wherever it knows no faster backend
    for name in ("torch_native", "triton"):
        register_attention_backend(name)(create_batched_attention)
    if not _is_fork_server():
        register_models()
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        skip_foreign_experts,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", plain_rotary, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
        keep_tower_width,
        HookType.AFTER,
    )
    pool = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
    HookRegistry.register(f"{pool}._init_kv_copy_and_warmup", no_slot_copies, HookType.REPLACE)
    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    HookRegistry.register(
        f"{group}.all_gather_into_tensor", all_gather_into_tensor, HookType.REPLACE
    )
    HookRegistry.register(f"{group}.reduce_scatter_tensor", reduce_scatter_tensor, HookType.REPLACE)
    HookRegistry.register(f"{group}.reduce_scatterv", reduce_scatterv, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", fork_children, HookType.AFTER
    )


def _is_fork_server() -> bool:
    """Return True in a fork server and in its forks. A fork server is started before the model that
    its forks will serve is known."""
    return "hybridflow.engines.sglang.preload" in sys.modules


def register_models() -> None:
    """Register the hooks for the model that this process serves. Applying a hook imports the
    model's file.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in models.hooks():
        HookRegistry.register(target, hook, HookType[kind])


def leave_out_megatron() -> None:
    """Prevent this process from importing Megatron-Core, unless it is already loaded.

    SGLang imports Megatron-Core, if installed, for a debugging tool
    (sglang/srt/debug_utils/dumper.py). Megatron's inference code then switches torch_memory_saver
    to a mode that cannot release CUDA graphs
    (megatron/core/inference/contexts/dynamic_context.py:64), so an engine that sleeps would crash
    at start-up.
    """
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]


def keep_loads_in_folder() -> None:
    """Move the file in which schedulers publish their load from /dev/shm to the engine's private
    folder.

    SGLang never removes it (sglang/srt/managers/load_snapshot.py:299). The guard removes the files
    that it has seen mapped, but would miss the file of a scheduler that fails before the guard's
    first scan.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.load_snapshot.shm_path_for", load_file, HookType.REPLACE
    )


def load_file(instance: str) -> str:
    """Return the path of the file in which an engine's schedulers publish their load."""
    return f"{tempfile.gettempdir()}/loads-{instance}"


def fork_children(_: Any, server_args: Any) -> None:
    """Start the scheduler and the detokenizer by fork, with the hooks of their model.

    sglang/srt/entrypoints/engine.py:1995 requests spawn because CUDA does not survive a fork, so
    each child imports SGLang again (about 8 CPU seconds). Without CUDA the imports can be shared,
    which makes start-up about twice as fast and halves the memory. With several data-parallel ranks
    the children are started by a process that already runs threads, so spawn is kept.
    """
    import multiprocessing

    from sglang.srt.plugins.hook_registry import HookRegistry

    if _is_fork_server():
        register_models()
        HookRegistry.apply_hooks()
    if server_args.dp_size == 1:
        multiprocessing.set_start_method("fork", force=True)


def all_gather_into_tensor(group: Any, output: Any, input: Any) -> None:
    """Replace upstream's custom all-gather operator for data-parallel attention, because it is
    registered only for accelerators (distributed/parallel_state.py:1372)."""
    group._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(group: Any, output: Any, input: Any) -> None:
    """Replace the reduce-scatter of SGLang's groups on CPU (distributed/parallel_state.py:1151)."""
    group._reduce_scatter_tensor(output, input)


def reduce_scatterv(group: Any, input_: Any, output: Any = None, sizes: Any = None) -> Any:
    """Replace the reduce-scatter used with expert parallelism, for which upstream uses NCCL
    (distributed/parallel_state.py:1265), with its fallback, an all-reduce followed by a slice."""
    return group._deterministic_reduce_scatterv(input_, output, sizes)


def plain_rotary(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Support latent attention without scaled rotary embedding (Moonlight).

    sglang/srt/layers/rotary_embedding/factory.py:478 supports only YaRN on CPU; the factory for
    other devices also supports plain embeddings. Arguments: head_size, rotary_dim, max_position,
    base, is_neox_style, rope_scaling, dtype, partial_rotary_factor, device.
    """
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    scaling = args[5] if len(args) > 5 else kwargs.get("rope_scaling")
    if scaling is not None:
        return original(*args, **kwargs)
    return get_rope(
        *args[:8], **{name: value for name, value in kwargs.items() if name != "device"}
    )


def keep_tower_width(model_config: Any, *_: Any) -> None:
    """Undo the padding of the vision tower's MLPs to a multiple of 32, which only SGLang's own CPU
    kernels need, and which its loader does not support on this platform
    (sglang/srt/layers/linear.py:551)."""
    tower: Any = getattr(model_config.hf_config, "vision_config", None)
    if hasattr(tower, "original_intermediate_size"):
        tower.intermediate_size = tower.original_intermediate_size


def no_slot_copies(pool: Any) -> None:
    """Skip the triton kernel that moves cache slots: drafts that are chains never need it
    (mem_cache/memory_pool.py:2375).
    """
    pool._kv_copy_config = None


def allocate_host_buffer(dims: Any, dtype: Any, device: str, *_: Any, **__: Any) -> Any:
    """Allocate the host buffer for `--enable-return-routed-experts`.

    Upstream registers the memory with the CUDA driver (sglang/srt/mem_cache/pool_host/common.py,
    ALLOC_MEMORY_FUNCS), which is absent here.
    """
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def skip_foreign_experts(
    original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, moe_runner_config: Any
) -> Any:
    """Support expert parallelism (`--ep-size` > 1), where the id -1 stands for experts on other
    ranks.

    sglang/srt/layers/moe/fused_moe_native.py:77 scatters by expert id and fails on -1. Here those
    (token, slot) pairs contribute nothing; the ranks' results are then summed as on an accelerator.
    """
    import torch
    from torch.nn import functional

    expert_of = topk_output.topk_ids
    weight_of = topk_output.topk_weights
    if not bool((expert_of < 0).any()):
        return original(layer, x, topk_output, moe_runner_config)
    if moe_runner_config.activation != "silu":
        raise NotImplementedError(
            f"activation {moe_runner_config.activation!r} is not supported with --ep-size > 1 on "
            "CPU"
        )
    total = torch.zeros_like(x)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (expert_of == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        gate, up = functional.linear(x[token], layer.w13_weight[expert]).chunk(2, dim=-1)
        out = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
        total.index_add_(0, token, out * weight_of[token, slot].to(out.dtype)[:, None])
    return total
