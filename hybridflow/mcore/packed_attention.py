"""Core attention over packed sequences with torch's SDPA, for machines without Transformer Engine.

Megatron's DotProductAttention does not support packed sequences (dot_product_attention.py:59, 154).
Segments are grouped by length class (powers of two), and each class runs as one padded causal
batch. Padded keys come after every real query, so the causal mask alone hides them. Under context
parallelism every rank gathers all keys and values and masks by position. For a layer with a sliding
window, keys before the window are also masked. For a layer with sinks, the softmax is computed here
instead of by SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.device.platform import Platform
from hybridflow.mcore.parallel import ZigZag


class SegmentClasses:
    """Segments grouped by length class.

    For each class, `gather` [n, longest] contains row indices (clamped to the segment), and `real`
    [n, longest] is False at padding. `places` [t] is the index of each packed row in the
    concatenation of the classes' padded rows.
    """

    def __init__(self, bounds: Tensor) -> None:
        """`bounds` is [s + 1] int64 on the CPU, since the sizes of the classes must be known on the
        host."""
        lengths = bounds.diff()
        is_filled = lengths > 0
        starts = bounds[:-1][is_filled]
        lengths = lengths[is_filled]
        classes = torch.ceil(torch.log2(lengths.double())).long()
        self.groups: list[tuple[Tensor, Tensor]] = []
        for value in classes.unique().tolist():
            chosen = classes == value
            start = starts[chosen, None]
            length = lengths[chosen, None]
            step = torch.arange(int(length.max()))[None, :]
            gather = start + torch.minimum(step, length - 1)
            self.groups.append((gather, step < length))
        rows = [bounds.new_zeros(0)]
        real = [rows[0].bool()]
        for gather, is_real in self.groups:
            rows.append(gather.reshape(-1))
            real.append(is_real.reshape(-1))
        self.rows = torch.cat(rows)
        self.real = torch.cat(real)
        self.places = self.rows.new_empty(int(self.real.sum()))
        self.places[self.rows[self.real]] = self.real.nonzero()[:, 0]

    @classmethod
    def of(cls, params: Any) -> SegmentClasses:
        """Return the length classes of the packed rows (`mcore.packed`), on the device. Computed
        once per micro-batch."""
        found = getattr(params, "segment_classes", None)
        if found is None:
            found = params.segment_classes = cls(params.bounds).upload(Platform.detect())
        return found

    def pad(self, packed: Tensor) -> Tensor:
        """Expand packed rows [t, ...] to the padded rows of all classes, one after another."""
        padded: Tensor = _Padded.apply(packed, self)
        return padded

    def split(self, padded: Tensor) -> list[Tensor]:
        """Split padded rows into [n, longest, ...] for each class."""
        shapes = [gather.shape for gather, _ in self.groups]
        parts = padded.split([shape.numel() for shape in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def pack(self, padded: Tensor) -> Tensor:
        """Inverse of `pad`: the packed rows [t, ...]."""
        packed: Tensor = _Packed.apply(padded, self)
        return packed

    def upload(self, platform: Platform) -> SegmentClasses:
        """Move all indices to the device without blocking the host. Returns self."""
        upload = platform.upload
        self.groups = [(upload(gather), upload(real)) for gather, real in self.groups]
        self.rows = upload(self.rows)
        self.real = upload(self.real)
        self.places = upload(self.places)
        return self


class _Padded(torch.autograd.Function):
    """Expand packed rows to the padded rows of all classes. The padding gets no gradient, because
    nothing attends to it and its outputs are dropped. A packed row's gradient therefore comes from
    a single padded row, and nothing has to be summed.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, classes: SegmentClasses) -> Tensor:
        """Map [t, ...] to [rows of all classes, ...]."""
        ctx.places = classes.places
        return packed.index_select(0, classes.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Map the gradient back to the packed rows."""
        return grad.index_select(0, ctx.places), None


class _Packed(torch.autograd.Function):
    """Select the packed rows from the padded rows of all classes."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, classes: SegmentClasses) -> Tensor:
        """Map [rows of all classes, ...] to [t, ...]."""
        ctx.classes = classes
        return padded.index_select(0, classes.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Map the gradient to the padded rows, with zeros in the padding."""
        classes = ctx.classes
        found = grad.index_select(0, classes.rows)
        if len(classes.places) < len(classes.rows):
            ones = [1] * (found.dim() - 1)
            is_padding = ~classes.real.view(-1, *ones)
            found.masked_fill_(is_padding, 0.0)
        return found, None


class ContextClasses:
    """Length classes for attention from one context-parallel rank's queries to all keys, which are
    concatenated in rank order.

    Each entry of `groups` consists of `queries` [n, longest query], the local row indices; `keys`
    [n, longest key], row indices into the concatenated keys; and `mask` [n, 1, longest query,
    longest key], True where a query may attend. Padded keys need no extra mask: they repeat the
    segment's last key with a position after every query. `places` [t']: index of each local row in
    the concatenation of the classes' padded queries.
    """

    def __init__(self, bounds: Tensor, rank: int, size: int) -> None:
        """`bounds` is [s + 1] int64 on the CPU."""
        whole = SegmentClasses(bounds)
        layout = ZigZag.of(bounds.numpy(), size)
        share = int(bounds[-1]) // size
        owner = torch.from_numpy(layout.owner)
        local = torch.from_numpy(layout.local)
        self.groups: list[tuple[Tensor, Tensor, Tensor]] = []
        self.places = torch.empty(share, dtype=torch.int64)
        behind = 0
        for gather, real in whole.groups:
            mine = real & (owner[gather] == rank)
            # this rank's rows of a segment come first, ordered by position; the remaining ones
            # repeat the last
            most = int(mine.sum(1).max())
            step = torch.argsort(~mine, dim=1, stable=True)[:, :most]
            queries = local[gather.gather(1, step)]
            keys = owner[gather] * share + local[gather]
            key_step = torch.arange(gather.shape[1])
            mask = key_step <= step[:, :, None]
            self.groups.append((queries, keys, mask[:, None]))
            is_query = mine.gather(1, step).reshape(-1)
            rows = queries.reshape(-1)[is_query]
            self.places[rows] = behind + is_query.nonzero()[:, 0]
            behind += queries.numel()

    def upload(self, platform: Platform) -> ContextClasses:
        """Move all indices to the device without blocking the host. Returns self."""
        self.groups = [tuple(map(platform.upload, group)) for group in self.groups]  # type: ignore[misc]
        self.places = platform.upload(self.places)
        return self


class PackedAttention(MegatronModule):
    """Causal grouped-query attention on `thd` (packed) or `sbhd` inputs.

    A drop-in replacement for DotProductAttention.
    """

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # number of tokens that a query attends to, including itself; 0: all tokens up to itself
        self.window = config.window_size[0] + 1 if has_window else 0
        self.softmax_offset = None  # the name in Transformer Engine
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute causal attention.

        thd: query, key [t, (kv) heads, d], value [t, kv heads, v] -> [t, heads*v], as returned by
        Transformer Engine. sbhd: [s, b, ...] -> [s, b, heads*v].

        v may differ from d (latent attention). Megatron 0.19 first pads the values to d and slices
        the result, which with sbhd must have three dimensions (multi_latent_attention.py:106).
        """
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            if self.config.context_parallel_size > 1:
                return self._context_parallel(query, key, value, packed_seq_params)
            return self._packed(query, key, value, packed_seq_params)
        out = self._causal(*(part.permute(1, 2, 0, 3) for part in (query, key, value)))
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: Any) -> Tensor:
        classes = SegmentClasses.of(params)
        padded = [classes.split(classes.pad(t)) for t in (query, key, value)]
        outs = []
        for parts in zip(*padded, strict=True):
            out = self._causal(*(part.transpose(1, 2) for part in parts))
            outs.append(out.transpose(1, 2).flatten(0, 1))
        packed = classes.pack(outs[0] if len(outs) == 1 else torch.cat(outs))
        return packed.flatten(1)

    def _context_parallel(self, query: Tensor, key: Tensor, value: Tensor, params: Any) -> Tensor:
        """Compute attention from this rank's queries to the keys and values of all context-parallel
        ranks.

        Keys and values are all-gathered; the backward pass reduce-scatters.
        """
        group = parallel_state.get_context_parallel_group()
        classes = getattr(params, "context_classes", None)
        if classes is None:
            classes = ContextClasses(params.bounds, group.rank(), group.size())
            params.context_classes = classes.upload(Platform.detect())

        def of_all_ranks(part: Tensor) -> Tensor:
            gathered: Tensor = gather_from_sequence_parallel_region(
                part.contiguous(), tensor_parallel_output_grad=True, group=group
            )
            return gathered

        key = of_all_ranks(key)
        value = of_all_ranks(value)
        outs = []
        for queries, keys, mask in classes.groups:
            q = query[queries].transpose(1, 2)
            k = key[keys].transpose(1, 2)
            v = value[keys].transpose(1, 2)
            out = self._masked(q, k, v, self._in_window(mask))
            outs.append(out.transpose(1, 2).flatten(0, 1))
        packed = torch.cat(outs).index_select(0, classes.places)
        return packed.flatten(1)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention: query, key [b, (kv) heads, s, d], value [b, kv heads, s, v] ->
        [b, heads, s, v].
        """
        length = query.shape[2]
        if self.window and length > self.window:
            steps = torch.arange(length, device=query.device)
            mask = self._in_window(steps <= steps[:, None])
            return self._masked(query, key, value, mask)
        return self._masked(query, key, value)

    def _in_window(self, causal: Tensor) -> Tensor:
        """Restrict a causal mask to this layer's window.

        `causal` [..., queries, keys] lets each query attend to all keys up to its own position.
        """
        if not self.window:
            return causal
        own = causal.sum(-1, keepdim=True) - 1
        position = torch.arange(causal.shape[-1], device=causal.device)
        return causal & (position > own - self.window)

    def _masked(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute attention where `mask` is True, or causal attention if it is None. Shapes are the
        same as in `_causal`.
        """
        if self.softmax_offset is not None:
            return self._with_sinks(query, key, value, mask, self.softmax_offset)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def _with_sinks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        offsets: Tensor,
    ) -> Tensor:
        """Same as `_masked`, with each head's sink as an additional logit that has no value
        vector."""
        many = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(many, dim=1)
        value = value.repeat_interleave(many, dim=1)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits = query @ key.transpose(-1, -2) * scale
        if mask is None:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~mask, -torch.inf)
        sinks = offsets.to(logits.dtype)[:, None, None]
        sinks = sinks.expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
        shares = logits.softmax(-1, dtype=torch.float32)[..., :-1]
        return shares.to(value.dtype) @ value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint layout of the sinks, if there are any."""
        if self.softmax_offset is None:
            return {}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return found
