"""Model of an engine's memory and generation time: a roofline for prefill and decoding over a
long-tailed distribution of response lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from statistics import NormalDist

from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import LocalTensor
from hybridflow.models.mla import LatentAttention
from hybridflow.planning.constants import FITTED, Constants
from hybridflow.planning.devices import Device
from hybridflow.planning.sizes import LayerShape, Numbers, head_shapes, layer_shapes
from hybridflow.reshard.engine_layouts import EngineRank, EngineShape

SPREAD = 1.0  # standard deviation of log response length; p99 is ten times the median
_QUANTILES = 128


@dataclass(frozen=True)
class Lengths:
    """Log-normal response lengths in tokens, truncated at `longest`. `mean` is the mean after
    truncation."""

    mean: float
    longest: int

    @cached_property
    def quantiles(self) -> tuple[float, ...]:
        """Lengths at the midpoints of `_QUANTILES` equally sized groups of responses, in ascending
        order.
        """
        normal = NormalDist()
        shape = []
        for i in range(_QUANTILES):
            shape.append(math.exp(SPREAD * normal.inv_cdf((i + 0.5) / _QUANTILES)))
        low = 1e-6 * self.longest
        high = 1e3 * self.longest
        for _ in range(60):  # bisect for the median that gives the mean after truncation
            middle = math.sqrt(low * high)
            mean = sum(min(middle * one, self.longest) for one in shape) / _QUANTILES
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return tuple(min(low * one, float(self.longest)) for one in shape)

    @property
    def weighted(self) -> float:
        """Token-weighted mean response length."""
        return sum(one * one for one in self.quantiles) / sum(self.quantiles)


@dataclass(frozen=True)
class Engine:
    """An engine; all engines of a job are identical.

    Attributes:
        decoder: the model; with its multi-token-prediction heads if the engine drafts with them.
        item: bytes per weight.
        kv_item: bytes per element of the KV cache.
        running: maximum number of concurrent requests.
        kv_tokens: maximum size of the KV cache in tokens.
        memory_fraction: fraction of device memory for weights and KV cache.
    """

    decoder: Decoder
    shape: EngineShape
    device: Device
    item: float = 2
    kv_item: float = 2
    running: int = 256
    kv_tokens: int = 1 << 40
    memory_fraction: float = 0.85
    constants: Constants = FITTED

    @cached_property
    def ranks(self) -> int:
        """Number of devices per engine."""
        return self.shape.tensor * self.shape.pipeline

    @cached_property
    def _layers(self) -> list[LayerShape]:
        return layer_shapes(self.decoder)

    @cached_property
    def numbers(self) -> Numbers:
        """Number of the model's weights on the largest rank, derived from the layout used for
        weight syncs."""
        most = Numbers()
        share = self.decoder.num_layers // self.shape.pipeline
        for stage in {0, self.shape.pipeline - 1}:
            rank = EngineRank(self.decoder, self.shape, stage * self.shape.tensor)
            total = _numbers([*rank.first(), *rank.last()])
            seen: dict[LayerShape, Numbers] = {}
            for layer in range(stage * share, (stage + 1) * share):
                shape = self._layers[layer]
                if shape not in seen:
                    seen[shape] = _numbers(rank.layer(layer))
                total += seen[shape]
            most = max(most, total, key=lambda numbers: numbers.total)
        return most

    @cached_property
    def draft(self) -> Numbers:
        """Number of weights on a rank for drafting with the model's heads."""
        last = EngineRank(self.decoder, self.shape, self.ranks - 1)
        return _numbers(last.draft())

    @cached_property
    def weights(self) -> float:
        """Bytes of weights on the largest rank."""
        return (self.numbers.total + self.draft.total) * self.item

    @cached_property
    def kv_token(self) -> float:
        """Bytes per token in a rank's KV cache, including the cache of the draft heads. Layers with
        sliding windows also cache all tokens."""
        elements = sum(layer.kv for layer in self._layers) / self.shape.pipeline
        elements += sum(layer.kv for layer in head_shapes(self.decoder))
        return elements * self._kv_element

    def kv_read(self, context: float) -> float:
        """Return the bytes of the cache that a rank reads for the next token of a request."""
        read = 0.0
        for layer in self._layers:
            read += layer.kv * min(context, layer.window or context)
        return read / self.shape.pipeline * self._kv_element

    @property
    def _kv_element(self) -> float:
        """Bytes per element of the KV cache on one rank."""
        attention = self.shape.tensor // self.shape.data_attention
        latent = isinstance(self.decoder.attention(0), LatentAttention)
        return self.kv_item / (1 if latent else min(attention, self.decoder.groups))

    @cached_property
    def state_request(self) -> float:
        """Size in bytes of one request's recurrent states on a rank, in all delta-net layers."""
        attention = self.shape.tensor // self.shape.data_attention
        return 4 * sum(layer.state for layer in self._layers) / self.shape.pipeline / attention

    @cached_property
    def kv_room(self) -> float:
        """Number of tokens that fit into the engine's KV cache, given the memory fraction and
        `kv_tokens`.
        """
        left = self.device.memory_gb * 1e9 * self.memory_fraction - self.weights
        left -= self.running / self.shape.data_attention * self.state_request
        if not self.kv_token:  # no layer has a cache
            return self.kv_tokens if left > 0 else 0
        room = left / self.kv_token * self.shape.data_attention
        return max(min(room, self.kv_tokens), 0)

    @property
    def kv_bytes(self) -> float:
        """Size of a rank's KV cache in bytes."""
        return self.kv_room * self.kv_token / self.shape.data_attention

    def graphs(self) -> float:
        """Return the size in bytes of CUDA graphs and activations, excluding weights and cache."""
        return 0.02 * self.device.memory_gb * 1e9

    def step_seconds(self, running: float, context: float) -> float:
        """Return the duration in seconds of a decoding step with `running` requests of `context`
        tokens each."""
        c = self.constants
        device = self.device
        shape = self.shape
        bandwidth = device.memory_gbs * 1e9 * c.decode_memory
        experts = max((layer.experts for layer in self._layers), default=0)
        topk = max((layer.topk for layer in self._layers), default=0)
        visited = 1 - (1 - topk / experts) ** running if experts else 1.0
        read = (self.numbers.dense + self.numbers.expert * visited) * self.item
        # every state is read and written
        each = self.kv_read(context) + 2 * self.state_request
        cached = running / shape.data_attention * each
        flops = self._flops * running / self.ranks / (device.peak(False) * c.gemm)
        layer = c.decode_layer_s
        if shape.tensor > device.domain:
            layer += c.decode_hop_s
        # pipeline stages work on different requests; a token passes through all of them
        computed = max(read / bandwidth + cached / bandwidth, flops)
        return computed + len(self._layers) * layer + c.decode_step_s

    @cached_property
    def _flops(self) -> float:
        each = sum(layer.flops for layer in self._layers)
        return each + 2 * self.decoder.vocab_size * self.decoder.hidden

    def seconds(
        self, requests: float, prompts: float, prompt_tokens: float, lengths: Lengths
    ) -> float:
        """Return how long one engine takes to complete `requests` responses to `prompts` prompts,
        including the longest response, in seconds.
        """
        prefill = prompts * prompt_tokens * self._flops / self.ranks
        prefill /= self.device.peak(False) * self.constants.gemm * self.constants.prefill
        slots = max(min(self.running, self.kv_room / (prompt_tokens + lengths.mean)), 1.0)
        tail = min(requests, slots)
        full = max(requests - slots, 0.0) * lengths.mean / slots
        middle = prompt_tokens + lengths.weighted / 2
        total = full * self.step_seconds(slots, middle)
        edges: Sequence[float] = (0.0, *lengths.quantiles)
        for number, (low, high) in enumerate(pairwise(edges)):
            if high > low:
                left = max(tail * (1 - number / _QUANTILES), 1.0)
                context = prompt_tokens + (low + high) / 2
                total += (high - low) * self.step_seconds(left, context)
        return prefill + total


def _numbers(tensors: Sequence[LocalTensor]) -> Numbers:
    found = Numbers()
    for local in tensors:
        count = prod(local.shape)
        found += Numbers(expert=count) if ".experts." in local.name else Numbers(count)
    return found
