"""Builds a Megatron GPTModel for a family and loads its weights."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_te_version
from packaging.version import Version
from torch import Tensor

from hybridflow.config.derived import expert_tensor_size, virtual_pipeline_size
from hybridflow.config.schema import ParallelConfig
from hybridflow.device.platform import Platform
from hybridflow.errors import ModelError
from hybridflow.mcore import bootstrap, megatron_versions, rotary, routers, vision
from hybridflow.mcore.layers import block_spec, check_windows, scale_embeddings
from hybridflow.mcore.parallel import coordinates
from hybridflow.mcore.scalar_output import replace_output_layer
from hybridflow.models import Family
from hybridflow.models.delta_net import check_context
from hybridflow.models.layout import Coordinates, LocalTensor, padded_vocab_size
from hybridflow.models.lora import is_adapter
from hybridflow.models.recompute import check_recompute
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.vision import check_vision, tower_of
from hybridflow.models.weights import WeightSource
from hybridflow.reshard.layout import rank_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CORE_ATTENTION = ("core_attn",)
# keys of Megatron's config: with any of them a gated MLP is not plain SwiGLU
OTHER_ACTIVATIONS = {"activation_func", "activation_func_clamp_value", "glu_linear_offset"}


def recompute_settings(recompute: str, modules: Sequence[str]) -> dict[str, Any]:
    """Translate `actor.recompute` and `actor.recompute_modules` into Megatron settings."""
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return (
        {"recompute_granularity": "selective", "recompute_modules": list(modules)}
        if recompute != "none"
        else {}
    )


def schedule_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the settings for the exchange of activations between pipeline stages. With an
    interleaved schedule over two stages, a rank's previous and next neighbours are the same rank.
    Because batched operations have no tags (p2p_communication.py:27-46), a send to the previous
    stage would match a receive from the previous stage, and gradients would be silently wrong.
    """
    return (
        {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        if virtual_pipeline_size(parallel) > 1
        else {}
    )


def stage_contents(family: Family, parallel: ParallelConfig) -> list[list[str]] | None:
    """Translate `actor.parallel.layers_per_stage` to Megatron's `pipeline_model_parallel_layout`.

    Returns the contents of each (virtual) stage in model order, or None if the key is unset.
    """
    if not parallel.layers_per_stage or parallel.pipeline == 1:
        return None
    stages = [["decoder"] * count for count in parallel.layers_per_stage]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * int(family.megatron_config().get("mtp_num_layers") or 0) + ["loss"]
    return stages


def transformer_config(
    family: Family,
    parallel: ParallelConfig,
    dtype: str,
    recompute: str = "none",
    recompute_modules: Sequence[str] = CORE_ATTENTION,
    further: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Build Megatron's config from the family, the parallel layout, the device (`device_settings`)
    and the additional fields `further` (`actor.megatron`).

    Raises:
        ModelError: Megatron rejects one of `further`.
    """
    is_cuda = Platform.detect().kind == "cuda"
    params_dtype = DTYPES[dtype]
    settings: dict[str, Any] = {
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "autocast_dtype": params_dtype,
        "bf16": params_dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers or None,
        "pipeline_model_parallel_layout": stage_contents(family, parallel),
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline
        if virtual_pipeline_size(parallel) > 1
        else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": expert_tensor_size(parallel),
        "sequence_parallel": parallel.sequence,
        # the values are overwritten with the HF weights, but without initialisation Megatron does
        # not mark its parameters as tensor-parallel (tensor_parallel/layers.py), and the gradient
        # norm then misses the other ranks' shares
        "perform_initialization": True,
        "gradient_accumulation_fusion": bootstrap.HAVE_GRADIENT_KERNEL,
        "bias_dropout_fusion": False,  # no dropout, and no bias to fuse with it
        "masked_softmax_fusion": False,  # only for attention with a mask; packed samples have none
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "flex"
        if parallel.moe_dispatcher == "deepep"
        else parallel.moe_dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        # losses return (sum, count); gradients are divided once by the global count
        "calculate_per_token_loss": True,
        **schedule_settings(parallel),
        **recompute_settings(recompute, recompute_modules),
    }
    settings |= family.megatron_config()
    settings |= device_settings(family, is_cuda, bootstrap.HAVE_TRANSFORMER_ENGINE)
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    # Megatron 0.16 allows the first only with sigmoid scores, where `routers` computes it with
    # softmax scores too, and the second only without expert tensor parallelism, where
    # `fused_experts` has separate biases
    unchecked = {
        name: settings.pop(name, False)
        for name in ("moe_router_enable_expert_bias", "add_bias_linear")
    }
    config = _made(kind, {"add_bias_linear": False, **settings}, further or {})
    vars(config).update(unchecked)
    rotary.set_attention_factor(config, family.rotary)
    return config


def _made(
    kind: type[TransformerConfig], settings: Mapping[str, Any], further: Mapping[str, Any]
) -> TransformerConfig:
    """Create Megatron's config. Values in `further` come from YAML, where enum members are written
    as their names.
    """
    if not further:
        return kind(**settings)
    given = dict(further)
    if "attention_backend" in given:
        given["attention_backend"] = AttnBackend[given["attention_backend"]]
    try:
        return kind(**{**settings, **given})
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"actor.megatron={dict(further)}: Megatron-Core {bootstrap.MEGATRON_VERSION} rejects "
            f"it: {error or type(error).__name__}"
        ) from error


def device_settings(family: Family, is_cuda: bool, transformer_engine: bool) -> dict[str, Any]:
    """Return the Megatron config settings that depend on the device and on Transformer Engine.

    docs/platforms.md lists them.
    """
    config = family.megatron_config()
    is_latent, is_mixture = (
        bool(config.get(name)) for name in ("multi_latent_attention", "num_moe_experts")
    )
    is_swiglu = bool(config.get("gated_linear_unit")) and not config.keys() & OTHER_ACTIVATIONS
    # TE's kernel for packed samples, and `torch_functions.rotate` in its place, ignore the
    # attention factor (rope_utils.py:295), and for latent attention the kernel supports only YaRN
    # (transformer_config.py:2068); Megatron 0.16 does not tell the kernel to rotate adjacent pairs
    # (rope_utils.py:302)
    is_interleaved = bool(config.get("rotary_interleaved"))
    # nor does it take the angles of each token (`rotary.use_axes`)
    is_plain = family.rotary.attention_factor == 1.0 and not family.rotary.sections
    fuses_rope = not is_latent and not is_interleaved and is_plain
    return {
        "use_cpu_initialization": not is_cuda,
        "persist_layer_norm": is_cuda,
        "deallocate_pipeline_outputs": is_cuda,  # a sent activation is only needed by its graph
        # SwiGLU, and its product with the router weights
        "bias_activation_fusion": transformer_engine and is_swiglu,
        # activation of the layer spec: our `swiglu`
        "use_te_activation_func": is_swiglu and not transformer_engine,
        "apply_rope_fusion": fuses_rope,
        "moe_permute_fusion": transformer_engine and is_mixture,
    }


def build_model(
    family: Family,
    parallel: ParallelConfig,
    dtype: str,
    recompute: str = "none",
    recompute_modules: Sequence[str] = CORE_ATTENTION,
    further: Mapping[str, Any] | None = None,
) -> list[GPTModel]:
    """Build this rank's stage with uninitialised weights: one model, or one per virtual stage.

    Takes the same arguments as `transformer_config`.
    """
    rotary.install()
    megatron_versions.install()
    if not bootstrap.HAVE_TRANSFORMER_ENGINE:
        from hybridflow.mcore import torch_modules

        torch_modules.install()
    else:
        _check_transformer_engine(dtype)
        check_windows(family, parallel)
    if parallel.moe_dispatcher == "deepep" and not bootstrap.HAVE_DEEP_EP:
        raise ModelError(
            "actor.parallel.moe_dispatcher=deepep: the package deep_ep cannot be imported on node "
            f"{socket.gethostname()}; run 'make setup LANE=gpu' there, or set "
            "moe_dispatcher=alltoall"
        )
    check_recompute(family, recompute, recompute_modules)
    check_context(family, parallel)
    check_vision(family, parallel)
    config = transformer_config(family, parallel, dtype, recompute, recompute_modules, further)
    routers.allow_biased_softmax(config)
    return [_build_chunk(family, config, at) for at in coordinates().virtual_stages()]


def _check_transformer_engine(dtype: str) -> None:
    """Raise ModelError if Megatron does not support the installed Transformer Engine version, or if
    that version does not support this dtype."""
    version = get_te_version()
    least, beyond = megatron_versions.transformer_engine_range(bootstrap.MEGATRON_VERSION)
    if not Version(least) <= version < Version(beyond):
        raise ModelError(
            f"node {socket.gethostname()} has Transformer Engine {version}; Megatron-Core "
            f"{bootstrap.MEGATRON_VERSION} supports >={least},<{beyond}: build the version in "
            "requirements/transformer-engine.txt with 'make setup LANE=gpu' there, or uninstall "
            "Transformer Engine from this environment"
        )
    if dtype == "float32":
        # transformer_engine/pytorch/attention/dot_product_attention/utils.py:428 (2.9): no backend
        # supports packed fp32
        raise ModelError(
            "model.dtype=float32: Transformer Engine does not support fp32 attention over packed "
            "samples; set model.dtype=bfloat16, or uninstall Transformer Engine in this environment"
        )


def _build_chunk(family: Family, config: TransformerConfig, at: Coordinates) -> GPTModel:
    stage = at.vpp_rank if at.vpp_size > 1 else None
    # Megatron's router and the modules of `torch_modules` do not specify a device
    with Platform.detect().current_device():
        model = GPTModel(
            config,
            block_spec(family, config, at),
            vocab_size=padded_vocab_size(family.vocab_size, at.tp_size),
            pre_process=at.is_first_stage,
            post_process=at.is_last_stage,
            parallel_output=True,
            vp_stage=stage,
            **family.gpt_model_kwargs(),
        )
    decoder: Any = getattr(family, "backbone", family)  # unwraps a scalar head
    if (local := getattr(decoder, "local_rotary", None)) is not None:
        rotary.use_kinds(model, config, family.rotary, local, decoder.windows)
    elif family.rotary.kind != "default":
        rotary.use_frequencies(model, config, family.rotary)
    if family.rotary.query_growth:
        rotary.grow_queries(model, family.rotary)
    if family.rotary.sections:
        rotary.use_axes(model, family.rotary)
    if at.is_first_stage and (tower := tower_of(family)) is not None:
        vision.attach(model, tower, config)
    if at.is_first_stage:
        scale_embeddings(model, getattr(decoder, "embedding_scale", 1.0))
    adapt_modules(model, family, family.local_tensors(at))
    if isinstance(family, ScalarHead):
        replace_output_layer(model, family.hidden, family.bias)
    elif at.is_last_stage:
        # `vocab_parallel` applies the output layer chunk by chunk; the module is still called so
        # that hooks on its weight run
        model.output_layer.forward = functools.partial(hidden_states, model.output_layer)
    return model


def adapt_modules(model: torch.nn.Module, family: Family, described: Sequence[LocalTensor]) -> None:
    """Adapt the modules of a model chunk, or of the prediction heads, to properties of the family
    that Megatron cannot configure. `described` lists the model's tensors in the family's map."""
    routers.shape_biases(model, described)
    if family.latent_norm_eps is not None:
        _set_latent_norm_eps(model, family.latent_norm_eps)


def _set_latent_norm_eps(model: torch.nn.Module, eps: float) -> None:
    """Set the eps of the latent norms, which are fused into the up projections."""
    for name, module in model.named_modules():
        if name.endswith((".linear_q_up_proj", ".linear_kv_up_proj")):
            module.eps = eps


def hidden_states(
    layer: Any, hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None
) -> tuple[Tensor, None]:
    """Return the hidden states [s, b, h] of all tokens, as the input to a ColumnParallelLinear's
    matrix product.

    The backward pass sums the gradient across the tensor-parallel ranks.
    """
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=layer.tp_group
        ), None
    return copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group), None


def output_weight(model: GPTModel) -> Tensor:
    """Return this rank's rows [v, h] of the last stage's output layer, whether or not it is tied to
    the embedding.
    """
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def wrap_for_training(
    models: Sequence[GPTModel], parallel: ParallelConfig
) -> list[DistributedDataParallel]:
    """Wrap each virtual stage with gradient buffers and data-parallel reduction."""
    mark_experts(models)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        check_for_nan_in_grad=False,
    )
    wrapped = []
    for chunk, model in enumerate(models):
        wrapped.append(
            DistributedDataParallel(model.config, config, model, disable_bucketing=chunk > 0)
        )
    settings = models[0].config  # shared by all virtual stages
    settings.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:  # no reduction before the last micro-batch
        settings.no_sync_func = (
            [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        )
    return wrapped


def mark_experts(models: Sequence[torch.nn.Module]) -> None:
    """Mark expert parameters so that their gradients are reduced over the experts' data-parallel
    group.

    tensor_parallel/layers.py:829, 1149 mark them only if EP > 1. With ETP != TP and EP = 1, their
    gradients would be reduced over the dense group and would be silently wrong. The mark also makes
    the optimizer's parameter groups, and therefore its checkpoints, independent of EP.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def by_chunk(
    models: Sequence[torch.nn.Module], heads: torch.nn.Module | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (tensor name prefix, model) for each model chunk and, if there are any, for the
    prediction heads, which belong to the last chunk.

    Prefixes are `chunk0.`, `chunk1.`, ... with virtual stages (as in `rank_tensors`), and empty
    otherwise.
    """
    prefix = ""
    for chunk, model in enumerate(models):
        prefix = f"chunk{chunk}." if len(models) > 1 else ""
        yield prefix, model
    if heads is not None:
        yield prefix, heads


def held_weights(
    models: Sequence[torch.nn.Module], heads: torch.nn.Module | None = None
) -> dict[str, Tensor]:
    """Return the parameters and the expert biases (buffers that training may update), keyed by
    Megatron name."""
    held: dict[str, Tensor] = {}
    for prefix, model in by_chunk(models, heads):
        biases = []
        for name, buffer in model.named_buffers():
            if name.endswith(".expert_bias"):
                biases.append((name, buffer))
        held |= {f"{prefix}{name}": tensor for name, tensor in (*model.named_parameters(), *biases)}
    return held


def local_parameters(
    models: Sequence[torch.nn.Module], family: Family, heads: torch.nn.Module | None = None
) -> dict[str, tuple[Tensor, LocalTensor]]:
    """Return every parameter on this rank together with its description in the family's map.

    Also includes the buffers stored in checkpoints (expert biases), but not adapters, which
    `mcore.lora` describes.

    Raises:
        ModelError: a name or shape differs between the model and the family's map.
    """
    described = {local.name: local for local in rank_tensors(family, coordinates())}
    buffers = {
        f"{prefix}{name}"
        for prefix, model in by_chunk(models, heads)
        for name, _ in model.named_buffers()
    }
    held = {
        name: tensor for name, tensor in held_weights(models, heads).items() if not is_adapter(name)
    }
    actual = {
        name: tensor for name, tensor in held.items() if name not in buffers or name in described
    }
    if described.keys() != actual.keys():
        extra = sorted(actual.keys() - described.keys())
        missing = sorted(described.keys() - actual.keys())
        raise ModelError(
            f"the family's map and the Megatron model differ: {extra[:4]} are not in the map, "
            f"{missing[:4]} are not in the model"
        )
    for name, local in described.items():
        if tuple(actual[name].shape) != local.shape:
            raise ModelError(
                f"{name} has shape {tuple(actual[name].shape)} in the model, but {local.shape} in "
                "the family's map"
            )
    return {name: (actual[name], local) for name, local in described.items()}


@torch.no_grad()
def load_weights(
    models: Sequence[torch.nn.Module],
    family: Family,
    source: WeightSource,
    heads: torch.nn.Module | None = None,
) -> None:
    """Load this rank's parameters piece by piece, and set padding to zero."""
    for parameter, local in local_parameters(models, family, heads).values():
        parameter.zero_()
        for piece in local.pieces:
            parameter[piece.slices()] = source.read(
                piece.source, piece.source_start, piece.shape
            ).to(parameter.dtype)
