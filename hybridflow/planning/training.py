"""Memory and time of a training rank: static state, activations in flight, optimizer updates and
forward passes.

Formulas: parameters and bytes as stored by Megatron-Core's distributed optimizer, activations
counted tensor by tensor (arXiv 2205.05198 for dense layers; experts and latent attention in
docs/planning.md), schedules from arXiv 2104.04473.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from hybridflow.config.schema import LoraConfig, OptimConfig
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import Coordinates, ParallelShape
from hybridflow.planning.constants import FITTED, Constants
from hybridflow.planning.devices import Device
from hybridflow.planning.sizes import (
    AdapterNumbers,
    LayerShape,
    Numbers,
    Product,
    adapter_numbers,
    embedding_copy,
    head_shapes,
    layer_shapes,
    stage_layers,
    stage_numbers,
)

ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Precision:
    """Bytes per element. `main` is the optimizer's copy of a weight; `moments` covers both Adam
    moments."""

    weight: float = 2
    gradient: float = 4
    main: float = 4
    moments: float = 8
    activation: float = 2
    linear_input: float = 2  # saved inputs of linear layers; 1 if they are stored in fp8
    fp8: bool = False  # matrix products in fp8

    @classmethod
    def of(cls, dtype: str, optim: OptimConfig | None = None) -> Precision:
        """Return the trainer's precision for `model.dtype`.

        Gradients are float32, and the optimizer state uses the precisions in `optim` (None:
        float32). Float32 weights need no main copy.
        """
        if dtype == "float32":
            return cls(weight=4, gradient=4, main=0, activation=4, linear_input=4)
        optim = optim or OptimConfig()
        return cls(
            main=ITEM[optim.main_params_dtype],
            moments=ITEM[optim.exp_avg_dtype] + ITEM[optim.exp_avg_sq_dtype],
        )


@dataclass(frozen=True)
class Cut(ParallelShape):
    """Parallel sizes of a role, and how its ranks shard optimizer state and activations."""

    sequence: bool = False
    distributed_optimizer: bool = True
    fully_sharded: bool = False  # FSDP2: weights and gradients are also sharded over all ranks

    @property
    def data(self) -> int:
        """Number of data-parallel copies of the model."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Number of ranks across which the optimizer state of dense parameters is sharded."""
        return self.data * self.context if self.distributed_optimizer else 1

    @property
    def expert_shards(self) -> int:
        """Number of ranks across which the optimizer state of an expert is sharded."""
        parts = self.expert * self.expert_tensor * self.pipeline
        return max(self.ranks // parts, 1) if self.distributed_optimizer else 1


@dataclass(frozen=True)
class Practice:
    """Options of a training system, other than its layout.

    Attributes:
        recompute: `full`, or modules: core_attn, mlp, mla_up_proj, moe_act, layernorm, moe,
            shared_experts.
        dispatch: alltoall sends a token to every expert, deepep once to each node.
        overlaps_gradients, overlaps_weights: data-parallel ranks overlap the gradient reduction
            with the last micro-batch's backward pass, and the gathering of updated weights with
            the first one's forward pass.
        logits_chunk: number of tokens whose logits are materialised at a time; None for all.
        keeps_expert_outputs: True if expert outputs are saved (without memory-efficient
            permutation).
        even_routing: True if routing is forced to be even, as in benchmarks.
        trains_heads: True if the decoder's multi-token-prediction heads are trained alongside the
            model, one micro-batch at a time, using an untrained copy of the embedding.
    """

    recompute: frozenset[str] = frozenset()
    dispatch: str = "alltoall"
    overlaps_gradients: bool = False
    overlaps_weights: bool = False
    overlaps_tensor: bool = False
    overlaps_expert: bool = False
    logits_chunk: int | None = None
    keeps_expert_outputs: bool = False
    even_routing: bool = False
    trains_heads: bool = False


@dataclass(frozen=True)
class Training:
    """A model trained with a given sharding."""

    decoder: Decoder
    cut: Cut
    device: Device
    precision: Precision = field(default_factory=Precision)
    practice: Practice = field(default_factory=Practice)
    scalar_head: bool = False
    constants: Constants = FITTED
    lora: LoraConfig | None = None  # adapters that are trained instead of the weights

    # ---- memory, in bytes per rank

    @cached_property
    def numbers(self) -> tuple[Numbers, ...]:
        """Parameter counts of a rank in each pipeline stage."""
        found = []
        for place in self._places:
            found.append(stage_numbers(self.decoder, place, self.scalar_head))
        return tuple(found)

    @cached_property
    def layers(self) -> tuple[tuple[tuple[LayerShape, int], ...], ...]:
        """For each pipeline stage, (shape, number of layers) per kind of layer, over all its
        virtual stages."""
        return tuple(stage_layers(self.decoder, place) for place in self._places)

    @cached_property
    def trained(self) -> tuple[Numbers, ...]:
        """Number of trained parameters per rank, for each pipeline stage."""
        if self.lora is not None:
            return tuple(one.factors for one in self._adapters)
        if not self.practice.trains_heads:
            return self.numbers
        found = []
        for place, numbers in zip(self._places, self.numbers, strict=True):
            copy = embedding_copy(self.decoder, place)
            found.append(Numbers(numbers.dense - copy.dense, numbers.expert))
        return tuple(found)

    @cached_property
    def _adapters(self) -> tuple[AdapterNumbers, ...]:
        if self.lora is None:
            return (AdapterNumbers(),) * self.cut.pipeline
        found = []
        for place in self._places:
            found.append(adapter_numbers(self.decoder, place, self.lora))
        return tuple(found)

    @cached_property
    def _places(self) -> list[Coordinates]:
        """The place of a rank in each pipeline stage."""
        return [self.cut.place(pp_rank=stage) for stage in range(self.cut.pipeline)]

    @cached_property
    def heads(self) -> tuple[LayerShape, ...]:
        """The layers of multi-token-prediction heads that the last stage computes in updates."""
        return tuple(head_shapes(self.decoder)) if self.practice.trains_heads else ()

    def weights(self, stage: int) -> float:
        """Return the size of the weights in bytes, including adapters."""
        count = self.numbers[stage].total + self._adapters[stage].factors.total
        return count * self.precision.weight / self._shards

    def trained_weights(self, stage: int) -> float:
        """Return the size in bytes of the weights that are trained: all of them, or the
        adapters."""
        return self.trained[stage].total * self.precision.weight / self._shards

    def merged_weights(self, stage: int) -> float:
        """Return the size in bytes of the copies into which a weight sync merges adapters."""
        if self.lora is not None and self.lora.sync == "adapter":
            return 0.0
        return self._adapters[stage].adapted.total * self.precision.weight / self._shards

    def gradients(self, stage: int) -> float:
        """Return the size of the gradient buffer in bytes."""
        return self.trained[stage].total * self.precision.gradient / self._shards

    @property
    def _shards(self) -> int:
        return self.cut.ranks if self.cut.fully_sharded else 1

    def static(self, stage: int) -> float:
        """Return the total size in bytes of weights, gradients and optimizer state."""
        return self.weights(stage) + self.gradients(stage) + self.optimizer(stage)

    def optimizer(self, stage: int) -> float:
        """Return the size in bytes of main weights and moments, which are sharded across ranks."""
        numbers = self.trained[stage]
        dense = numbers.dense / self.cut.shards
        expert = numbers.expert / self.cut.expert_shards
        return (self.precision.main + self.precision.moments) * (dense + expert)

    def tokens(self, micro_tokens: float) -> float:
        """Return how many of a micro-batch's tokens one rank processes outside tensor-parallel
        regions.
        """
        tokens = micro_tokens / self.cut.context
        return tokens / self.cut.tensor if self.cut.sequence else tokens

    def layer_activations(
        self, layer: LayerShape, micro_tokens: float, everything: bool = False
    ) -> float:
        """Return the number of bytes that a layer saves for its backward pass. With `everything`,
        ignore recomputation."""
        recompute = frozenset() if everything else self.practice.recompute
        cut = self.cut
        size = self.precision.activation
        small = self.precision.linear_input
        whole = self.tokens(micro_tokens)
        divided = micro_tokens / cut.context / cut.tensor
        if "full" in recompute:
            return whole * layer.hidden * size
        # Separate norms exist only in latent attention and before experts. Others are fused into a
        # linear layer, which saves its input.
        norms = 2
        if "layernorm" in recompute:
            norms -= (layer.low_rank > 0) + (layer.experts > 0)
        of_norms = norms * layer.hidden * small
        found = whole * (2 * layer.hidden * size + of_norms + layer.low_rank * size)
        heads = layer.heads - layer.core_output
        if "mla_up_proj" in recompute:
            heads -= layer.expanded
        found += divided * (max(heads, 0) * size + layer.core_output * small)
        if layer.experts and "moe" in recompute:
            return found
        dense = "shared_experts" if layer.experts else "mlp"
        if dense not in recompute:
            found += divided * layer.ffn * (2 * size + small)
        routed = layer.topk * layer.hidden * small + 2 * layer.routed_ffn * size
        if "moe_act" not in recompute:
            routed += layer.routed_ffn * small
        if self.practice.keeps_expert_outputs:
            routed += layer.topk * layer.hidden * size
        return found + whole * (routed * self._busiest + 8 * layer.experts)

    @property
    def _busiest(self) -> float:
        """Load of the busiest expert rank relative to the mean."""
        even = self.practice.even_routing or self.cut.expert == 1
        return 1.0 if even else self.constants.imbalance

    def in_flight(self, stage: int, micro_batches: int) -> float:
        """Return the number of micro-batches whose activations a stage holds at its peak (1F1B, or
        interleaved). A virtual stage counts as a fraction."""
        p = self.cut.pipeline
        v = self.cut.virtual_pipeline
        if v == 1:
            return min(micro_batches, p - stage)
        chunks = min(micro_batches * v, 2 * (p - stage - 1) + (v - 1) * p + 1)
        return chunks / v

    def logits(self, stage: int, micro_tokens: float) -> float:
        """Return the size in bytes of the last stage's logits: a float32 copy, a copy in the
        activation dtype, and the float32 gradient."""
        if stage != self.cut.pipeline - 1 or self.scalar_head:
            return 0.0
        rows = micro_tokens / self.cut.context
        if self.practice.logits_chunk is not None:
            rows = min(rows, self.practice.logits_chunk)
        return rows * self.decoder.vocab_size / self.cut.tensor * (8 + self.precision.activation)

    def activations(self, stage: int, micro_tokens: float, micro_batches: int) -> float:
        """Return the peak size in bytes of activations: micro-batches in flight, logits, and the
        layer being recomputed."""
        kept = 0.0
        # all recomputed activations of one layer are in memory at the same time
        again = 0.0
        freed = 0.0
        for layer, count in self.layers[stage]:
            size = self.layer_activations(layer, micro_tokens)
            whole = self.layer_activations(layer, micro_tokens, everything=True)
            kept += count * size
            again = max(again, whole)
            freed = max(freed, whole - size)
        working = again if "full" in self.practice.recompute else max(0.5 * again, freed)
        if stage == self.cut.pipeline - 1:  # heads run between the passes of the model
            heads = sum(self.layer_activations(one, micro_tokens, True) for one in self.heads)
            working = max(working, heads)
        kept *= self.in_flight(stage, micro_batches)
        return kept + working + self.logits(stage, micro_tokens)

    def forward_activations(self, stage: int, micro_tokens: float) -> float:
        """Return the peak size in bytes of activations in a pass without gradients: one layer and a
        chunk of logits."""
        again = 0.0
        for layer, _ in self.layers[stage]:
            again = max(again, self.layer_activations(layer, micro_tokens, everything=True))
        return again + self.logits(stage, micro_tokens)

    def groups(self) -> float:
        """Return the size in bytes of communication buffers for the kinds of parallelism in use."""
        cut = self.cut
        kinds = (cut.tensor, cut.pipeline, cut.context, cut.expert, cut.data)
        return sum(size > 1 for size in kinds) * self.constants.group_gb * 1e9

    # ---- time, in seconds

    def stage_seconds(self, stage: int, micro_tokens: float, length: float) -> tuple[float, float]:
        """Return the (forward, backward) durations in seconds on a stage for a micro-batch of
        sequences of this length."""
        forward = backward = 0.0
        for layer, count in self.layers[stage]:
            f, b = self._layer_seconds(layer, micro_tokens, length)
            forward = forward + count * f
            backward = backward + count * b
        if stage == self.cut.pipeline - 1 and not self.scalar_head:
            product = Product(self.decoder.vocab_size, self.decoder.hidden)
            head = self._product_seconds([product], micro_tokens / self.cut.context, 1)
            forward = forward + head
            backward = backward + self._backward * head
            for one in self.heads:  # only in updates; the accuracy takes another pass over logits
                f, b = self._layer_seconds(one, micro_tokens, length)
                backward = backward + f + b + 4 * head
        return forward, backward

    @property
    def _backward(self) -> float:
        """Backward operations per forward operation of a linear layer, for the gradients of its
        input and weight. Frozen weights have no gradient; adapter gradients are not counted."""
        return 2.0 if self.lora is None else 1.0

    def _layer_seconds(
        self, layer: LayerShape, micro_tokens: float, length: float
    ) -> tuple[float, float]:
        c = self.constants
        device = self.device
        cut = self.cut
        mine = micro_tokens / cut.context
        dense = [product for product in layer.mlp if not product.is_expert]
        experts = [product for product in layer.mlp if product.is_expert]
        attention = self._product_seconds(layer.attention, mine, layer.topk)
        mlp = self._product_seconds(dense, mine, layer.topk)
        routed = self._product_seconds(experts, mine, layer.topk, layer.experts)
        products = attention + mlp + routed
        pairs = mine * layer.pairs(length)
        core = layer.core / cut.tensor * pairs / (device.peak(False) * c.attention)
        saved = self.layer_activations(layer, micro_tokens, everything=True)
        moved = saved / self._memory_speed
        tensor = self._tensor_seconds(layer, mine)
        dispatch = self._expert_seconds(layer, micro_tokens)
        waits = c.expert_layer_s if layer.experts else 0.0
        forward = products + core + moved * c.traffic_forward
        forward += 2 * tensor
        forward += 2 * dispatch
        forward += waits / 3
        backward = self._backward * products
        backward += core * 2.5 * c.attention / c.attention_backward
        backward += moved * c.traffic_backward + 3 * tensor + 2 * dispatch + waits * 2 / 3
        again = {"full": forward, "core_attn": core}
        if layer.experts:
            again["shared_experts"] = mlp
            again["moe"] = mlp + routed + 2 * dispatch + tensor
        else:
            again["mlp"] = mlp
        if layer.expanded:
            again["mla_up_proj"] = 0.6 * attention
        recomputed = sum(again[name] for name in again if name in self.practice.recompute)
        return forward, backward + recomputed

    @cached_property
    def _memory_speed(self) -> float:
        """Bytes per second of a device's memory."""
        return self.device.memory_gbs * 1e9 * self.constants.memory

    @cached_property
    def _domain_speed(self) -> float:
        """Bytes per second between the devices of a fast domain."""
        return self.device.domain_gbs * 1e9 * self.constants.domain

    @cached_property
    def _network_speed(self) -> float:
        """Bytes per second of a network device."""
        return self.device.network_gbs * 1e9 * self.constants.network

    def _product_seconds(
        self, found: Iterable[Product], tokens: float, topk: int, experts: int = 0
    ) -> float:
        """Return the duration in seconds of a rank's forward matrix products.

        Tensor parallelism splits the longer side. Tokens are divided among the experts.
        """
        c = self.constants
        device = self.device
        cut = self.cut
        fp8 = self.precision.fp8 and bool(device.fp8_tflops)
        speed = device.peak(fp8) * (c.gemm_fp8 if fp8 else c.gemm)
        total = 0.0
        for one in found:
            if one.is_expert:
                # the tokens of all ranks that share a set of experts, divided over these experts
                local = experts / cut.expert
                rows = tokens / cut.tensor * topk * cut.expert / experts * cut.expert_tensor
                cuts = cut.expert_tensor
                copies = local
                busiest = self._busiest
            else:
                rows = tokens
                cuts = cut.tensor
                copies = one.copies
                busiest = 1.0
            wide = max(one.rows, one.columns) / cuts
            narrow = min(one.rows, one.columns)
            share = _reached(rows, c.gemm_half)
            share *= _reached(wide, c.gemm_half)
            share *= _reached(narrow, c.gemm_half)
            size = self.precision.linear_input
            nbytes = copies * (wide * narrow * size + rows * (wide + narrow) * 2)
            computed = 2 * rows * wide * narrow * copies / (speed * share)
            total += busiest * max(computed, nbytes / self._memory_speed)
        return total

    def _tensor_seconds(self, layer: LayerShape, tokens: float) -> float:
        """Return the duration in seconds of one gather and one scatter of hidden states across
        tensor ranks.

        A dense layer has two such pairs; an MoE layer has one, plus one if it has shared experts.
        """
        size = self.cut.tensor
        if size == 1:
            return 0.0
        pairs = 1.0 if layer.ffn else 0.5
        nbytes = 2 * tokens * layer.hidden * self.precision.activation * (size - 1) / size
        exposed = self.constants.exposed_tensor_overlap if self.practice.overlaps_tensor else 1.0
        return pairs * nbytes / self.link(size) * exposed

    def _expert_seconds(self, layer: LayerShape, micro_tokens: float) -> float:
        """Return the duration in seconds of one dispatch or combine of a rank's tokens."""
        cut = self.cut
        device = self.device
        if cut.expert == 1 or not layer.experts:
            return 0.0
        tokens = micro_tokens / cut.context / cut.tensor
        nbytes = tokens * layer.hidden * self.precision.activation
        inside = min(cut.expert, max(device.domain // cut.expert_tensor, 1))
        groups = cut.expert // inside
        is_deepep = self.practice.dispatch == "deepep"
        sharing = cut.expert
        copies = layer.topk * (cut.expert - inside) / cut.expert
        if is_deepep and groups > 1:
            sharing = inside
            copies = (groups - 1) * (1 - (1 - 1 / groups) ** layer.topk)
        fast = nbytes * layer.topk * (inside - 1) / sharing / self._domain_speed
        slow = nbytes * copies / self._network_speed
        together = max(fast, slow) if is_deepep else fast + slow
        exposed = self.constants.exposed_expert_overlap if self.practice.overlaps_expert else 1.0
        return together * self._busiest * exposed

    def link(self, ranks: int, stride: int = 1) -> float:
        """Return the bandwidth in bytes per second per rank of a collective over `ranks` ranks that
        are `stride` apart.

        A ring leaves each fast domain once, using the network devices of all its members in that
        domain.
        """
        device = self.device
        together = max(min(ranks, device.domain // stride), 1)
        if together == ranks:
            return self._domain_speed
        slow = together * device.network_gbs * 1e9 * self.constants.network
        return min(self._domain_speed, slow)

    def pass_seconds(
        self, micro_tokens: float, micro_batches: float, length: float, backward: bool = True
    ) -> float:
        """Return the duration in seconds of a forward (and backward) pass over `micro_batches`
        micro-batches per data-parallel rank, including the pipeline bubble."""
        p = self.cut.pipeline
        v = self.cut.virtual_pipeline
        asked = range(p) if self.cut.layers_per_stage else {0, p // 2, p - 1}
        each = 0.0
        for stage in asked:
            forward, back = self.stage_seconds(stage, micro_tokens, length)
            each = max(each, forward + back if backward else forward)
        handover = 0.0
        if p > 1:
            nbytes = self.tokens(micro_tokens) * self.decoder.hidden * self.precision.activation
            passes = 2 if backward else 1
            handover = passes * v * nbytes / self._network_speed
            if v > 1:
                handover *= 0.5
        return (micro_batches + (p - 1) / v) * (each + handover)

    def update_seconds(self, micro_tokens: float, micro_batches: float, length: float) -> float:
        """Return the duration in seconds of one optimizer update: forward and backward passes,
        gradient reduction, weight gathering and the optimizer step."""
        most = max(range(self.cut.pipeline), key=lambda stage: self.numbers[stage].total)
        stepped = 2 * self.optimizer(most) / self._memory_speed
        passed = self.pass_seconds(micro_tokens, micro_batches, length)
        exposed = self._data_seconds(most, micro_tokens, length)
        return passed + exposed + stepped

    def _data_seconds(self, stage: int, micro_tokens: float, length: float) -> float:
        """Return the exposed seconds of gradient reduction and weight gathering per update.

        If they overlap computation, at most the duration of one micro-batch is hidden.
        """
        cut = self.cut
        numbers = self.trained[stage]
        share = self.constants.exposed_data_parallel
        expert = cut.expert * cut.expert_tensor
        each = 0.0  # seconds if every parameter had one byte
        for count, ranks, stride in (
            (numbers.dense, cut.data * cut.context, cut.tensor),
            (numbers.expert, max(cut.ranks // (expert * cut.pipeline), 1), expert),
        ):
            each += count * (ranks - 1) / ranks / self.link(ranks, stride)
        forward, backward = self.stage_seconds(stage, micro_tokens, length)
        waits = 0.0
        for size, overlaps, seconds in (
            (self.precision.gradient, self.practice.overlaps_gradients, backward),
            (self.precision.weight, self.practice.overlaps_weights, forward),
        ):
            whole = size * each
            waits += max(share * whole, whole - seconds) if overlaps else whole
        return waits

    def flops(self, tokens: float, length: float) -> float:
        """Return the number of operations in the whole model's forward and backward pass over
        `tokens` tokens (causal attention, with the layers' windows; no recomputation)."""
        each = 0.0
        for layer in (*layer_shapes(self.decoder), *self.heads):
            each += layer.flops + layer.core * layer.pairs(length)
        head = 0 if self.scalar_head else 2 * self.decoder.vocab_size * self.decoder.hidden
        return 3 * tokens * (each + (1 + len(self.heads)) * head)


def _reached(side: float, half: float) -> float:
    return side / (side + half)
