"""Build a Megatron GPTModel for a family, and fill it with weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from hybridflow.config.derived import expert_tensor_size
from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.mcore import bootstrap
from hybridflow.mcore.parallel import coordinates
from hybridflow.mcore.scalar_output import replace_output_layer
from hybridflow.models import Family
from hybridflow.models.layout import LocalTensor, padded_vocab_size
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.weights import WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(family: Family, parallel: ParallelConfig, dtype: str) -> TransformerConfig:
    """Megatron's config: what the family says, the layout, and no fusion that needs a CUDA extension."""
    is_cuda, params_dtype = torch.cuda.is_available(), DTYPES[dtype]
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
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": expert_tensor_size(parallel),
        "sequence_parallel": parallel.sequence,
        # the values are overwritten from the HF side, but without initialisation Megatron does not mark its parameters as
        # tensor-parallel (tensor_parallel/layers.py), and the gradient norm then misses the other ranks' shares
        "perform_initialization": True,
        "use_cpu_initialization": not is_cuda,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": is_cuda,
        "apply_rope_fusion": False,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": False,
        # losses return (sum, count); gradients are divided once, by the global count
        "calculate_per_token_loss": True,
    }
    settings |= family.megatron_config()
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    return kind(**settings)


def build_model(family: Family, parallel: ParallelConfig, dtype: str) -> GPTModel:
    """This rank's stage, uninitialised weights."""
    if not bootstrap.HAVE_TRANSFORMER_ENGINE:
        from hybridflow.mcore import cpu_modules

        cpu_modules.install()
    config = transformer_config(family, parallel, dtype)
    at = coordinates()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=padded_vocab_size(family.vocab_size, at.tp_size),
        pre_process=at.is_first_stage,
        post_process=at.is_last_stage,
        parallel_output=True,
        **family.gpt_model_kwargs(),
    )
    if isinstance(family, ScalarHead):
        replace_output_layer(model, family.hidden, family.bias)
    return model


def wrap_for_training(model: GPTModel, distributed_optimizer: bool) -> DistributedDataParallel:
    """Gradient buffers and data-parallel reduction."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False, check_for_nan_in_grad=False
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def local_parameters(model: torch.nn.Module, family: Family) -> dict[str, tuple[torch.Tensor, LocalTensor]]:
    """Every parameter of this rank (and every buffer that a checkpoint holds: expert biases) with its description by the family.

    Raises:
        ModelError: the model and the family's map disagree on a name or a shape.
    """
    described = {local.name: local for local in family.local_tensors(coordinates())}
    actual: dict[str, torch.Tensor] = dict(model.named_parameters())
    actual |= {name: buffer for name, buffer in model.named_buffers() if name in described and described[name].is_buffer}
    if described.keys() != actual.keys():
        extra, missing = sorted(actual.keys() - described.keys()), sorted(described.keys() - actual.keys())
        raise ModelError(f"the family's map and the Megatron model disagree: not in the map {extra[:4]}, not in the model {missing[:4]}")
    for name, local in described.items():
        if tuple(actual[name].shape) != local.shape:
            raise ModelError(f"{name} has shape {tuple(actual[name].shape)} in the model, {local.shape} in the family's map")
    return {name: (actual[name], local) for name, local in described.items()}


@torch.no_grad()
def load_weights(model: torch.nn.Module, family: Family, source: WeightSource) -> None:
    """Fill the rank's parameters piece by piece; padding becomes zero."""
    for parameter, local in local_parameters(model, family).values():
        parameter.zero_()
        for piece in local.pieces:
            parameter[piece.slices()] = source.read(piece.source, piece.source_start, piece.shape).to(parameter.dtype)
