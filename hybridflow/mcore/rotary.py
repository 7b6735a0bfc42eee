"""Rotary embeddings with a family's own frequencies, for types that Megatron's settings cannot
express, and position-dependent query scaling.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention

from hybridflow.device.platform import Platform
from hybridflow.mcore.torch_functions import positions_of, rotate_unfused
from hybridflow.models.rotary import Rotary


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding with given frequencies.

    Cosines and sines are multiplied by an attention factor. Latent attention reads the factor from
    this module's output (multi_latent_attention.py:564), grouped-query attention from the config
    (attention.py:1102, `set_attention_factor`).
    """

    def __init__(self, rotary: Rotary, config: TransformerConfig) -> None:
        is_on_cpu = bool(config.use_cpu_initialization)
        super().__init__(
            rotary.dim,
            1.0,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=rotary.theta,
            use_cpu_initialization=is_on_cpu,
        )
        platform = Platform("cpu") if is_on_cpu else Platform.detect()
        self.inv_freq = rotary.frequencies().to(platform.current_device())
        self.factor = rotary.attention_factor if config.multi_latent_attention else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the angles [s, 1, 1, dim] of positions 0 to s - 1.

        For latent attention, also returns the attention factor.
        """
        angles: torch.Tensor = super().forward(*args, **kwargs)
        return angles if self.factor is None else (angles, self.factor)


def install() -> None:
    """Replace Megatron's unfused rotation of packed sequences with one that does not synchronise on
    their lengths.

    Idempotent.

    The replacement is used by latent attention and by rotary types with an attention factor, with
    and without Transformer Engine.
    """
    rope_utils._apply_rotary_pos_emb_thd = rotate_unfused


def set_attention_factor(config: TransformerConfig, rotary: Rotary) -> None:
    """Configure grouped-query attention to multiply cosines and sines by the attention factor.

    Megatron computes 0.1 * mscale * ln(scaling factor) + 1 from these attributes; with a scaling
    factor of e this equals the attention factor.
    """
    names = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
    for name, value in zip(
        names, (math.e, 10.0 * (rotary.attention_factor - 1.0), 0.0), strict=True
    ):
        vars(config).pop(name, None)
        if rotary.attention_factor != 1.0:
            vars(config)[name] = value


def use_frequencies(model: torch.nn.Module, config: TransformerConfig, rotary: Rotary) -> None:
    """Replace the rotary modules of a model, including those of its latent attention layers."""
    for module in list(model.modules()):
        if isinstance(getattr(module, "rotary_pos_emb", None), RotaryEmbedding):
            module.rotary_pos_emb = ScaledRotaryEmbedding(rotary, config)


class RotaryEmbeddingsByKind(ScaledRotaryEmbedding):
    """The stacked rotary angles [2, s, 1, 1, dim] of full-attention layers and sliding-window
    layers.

    They form a single tensor, so that Megatron passes it through recomputation. Each attention
    layer selects its half (`use_kinds`).
    """

    def __init__(self, full: Rotary, local: Rotary, config: TransformerConfig) -> None:
        super().__init__(full, config)
        self.local = ScaledRotaryEmbedding(local, config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the angles of positions 0 to s - 1."""
        return torch.stack([super().forward(*args, **kwargs), self.local(*args, **kwargs)])


def use_kinds(
    model: torch.nn.Module,
    config: TransformerConfig,
    full: Rotary,
    local: Rotary,
    windows: Sequence[int],
) -> None:
    """Make each attention layer use the rotary embedding of its kind (full or sliding-window).
    `windows` is `Decoder.windows`.
    """

    def choose(number: int) -> Callable[..., Any]:
        def hook(attention: Any, inputs: Any, named: dict[str, Any]) -> Any:
            stacked = named["rotary_pos_emb"]
            parts = getattr(stacked, "parts", None)
            if parts is None:  # shared by all layers: `rotate` caches cosines by identity
                parts = stacked.parts = stacked.unbind(0)
            return inputs, {**named, "rotary_pos_emb": parts[number]}

        return hook

    for module in list(model.modules()):
        if isinstance(getattr(module, "rotary_pos_emb", None), RotaryEmbedding):
            module.rotary_pos_emb = RotaryEmbeddingsByKind(full, local, config)
        if isinstance(module, SelfAttention):
            has_window = bool(windows and windows[module.layer_number - 1])
            module.register_forward_pre_hook(choose(int(has_window)), with_kwargs=True)
            if has_window:
                module.config = copy.copy(config)
                set_attention_factor(module.config, local)


def use_axes(model: torch.nn.Module, rotary: Rotary) -> None:
    """Rotate the tokens of a micro-batch that has positions on three axes (`packed.axes` [3, t]) by
    the angles of these positions. In all other micro-batches, positions are the same on every axis,
    so the standard angles apply.
    """

    def turn(_: Any, inputs: Any, named: dict[str, Any]) -> None:
        packed = named["packed_seq_params"]
        if (axes := getattr(packed, "axes", None)) is None:
            return
        which = torch.tensor(rotary.axes(), device=axes.device)
        half = axes[which].t().float() * rotary.frequencies().to(axes.device)
        # read by `rotate_unfused`, in recomputed layers too: the bounds are the same object there
        packed.cu_seqlens_q.angles = torch.cat((half, half), dim=-1)[:, None, None]

    model.register_forward_pre_hook(turn, with_kwargs=True)


def grow_queries(model: torch.nn.Module, rotary: Rotary) -> None:
    """In every core attention, scale each query by a factor that depends on the query's position
    (`Rotary.query_growth`).
    """

    def grow(attention: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        query, *others = inputs
        packed = named["packed_seq_params"]
        factors = getattr(packed, "query_factors", None)
        if factors is None:
            group = parallel_state.get_context_parallel_group()
            positions = positions_of(packed.cu_seqlens_q, len(query), group.size(), group.rank())
            growth = torch.log1p((positions // rotary.original).float())
            factors = packed.query_factors = 1 + rotary.query_growth * growth[:, None, None]
        return (query * factors.to(query.dtype), *others), named

    for module in list(model.modules()):
        if isinstance(module, SelfAttention):
            module.core_attention.register_forward_pre_hook(grow, with_kwargs=True)
