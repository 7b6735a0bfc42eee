"""Configuration keys for Megatron's layout, optimizer and recomputation. Part of
`hybridflow.config.schema`, which documents the conventions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.keys import Decay, NonNegative, NonNegativeInt, Positive, PositiveInt

# Megatron-Core's names (transformer_config.py:411, 0.16.1)
RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"
]


@dataclass(frozen=True)
class ParallelConfig:
    """Megatron parallel sizes (verl's names in brackets). docs/parallelism.md lists the legal
    combinations."""

    tensor: PositiveInt = 1  # [tensor_model_parallel_size]
    pipeline: PositiveInt = 1  # [pipeline_model_parallel_size]
    # layers of the first and of the last stage, if different from the others; 0: an even share
    first_stage_layers: NonNegativeInt = 0
    last_stage_layers: NonNegativeInt = 0  # the same for the last stage
    # layers of every stage, instead of the other keys: pipeline x virtual_pipeline numbers in the
    # order of the model [pipeline_model_parallel_layout]; the first and the last may be 0
    layers_per_stage: tuple[NonNegativeInt, ...] = ()
    # interleaved model chunks per pipeline rank; null: 1
    virtual_pipeline: PositiveInt | None = None
    # ranks that share each sequence (zigzag); a sequence is padded to a multiple of 2 x context
    context: PositiveInt = 1
    expert: PositiveInt = 1  # ranks over which the experts of a layer are divided
    expert_tensor: PositiveInt | None = None  # null: 1 when expert > 1, else `tensor`
    sequence: bool = False  # sequence parallelism; needs tensor > 1
    # shard main weights and moments over data-parallel ranks
    distributed_optimizer: bool = True
    # reduce gradients over data-parallel ranks during the backward pass
    overlap_grad_reduce: bool = False
    # gather updated weights during the next forward pass; needs distributed_optimizer
    overlap_param_gather: bool = False
    # dispatch of tokens to experts; deepep (GPUs only) sends a token to each node only once
    moe_dispatcher: Literal["alltoall", "allgather", "deepep"] = "alltoall"


@dataclass(frozen=True)
class OptimConfig:
    """Megatron's AdamW."""

    lr: Positive = 1e-6  # learning rate after the warm-up
    min_lr: NonNegative = 0.0  # at most lr
    # from lr to min_lr over lr_decay_steps; constant: no decay
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: NonNegativeInt = 0  # optimizer updates
    lr_decay_steps: int | None = None  # optimizer updates; required by linear and cosine
    weight_decay: float = 0.01  # decoupled, as in AdamW
    adam_beta1: Decay = 0.9  # decay of the first moment
    adam_beta2: Decay = 0.999  # decay of the second moment
    adam_eps: float = 1e-8  # added to the root of the second moment
    clip_grad: NonNegative = 1.0  # maximum gradient norm; 0: unlimited
    # use Transformer Engine's FusedAdam for the main weights and moments, in the precision of the
    # next three keys; needs model.dtype=bfloat16 and parallel.distributed_optimizer
    # [use_precision_aware_optimizer]
    precision_aware: bool = False
    # precision_aware: precision of the main copy of the weights
    main_params_dtype: Literal["float32", "float16"] = "float32"
    # precision_aware: precision of the first moment
    exp_avg_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # precision_aware: precision of the second moment
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
