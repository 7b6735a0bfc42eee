"""Low-rank adapters on transformers' linears and stacked experts, sharded by FSDP2.

The factors are parameters of the modules that they adapt, and are added before the model is
sharded: `q_proj.lora_A` [rank, in] and `q_proj.lora_B` [out, rank]. Linears that share an A
(`models.lora`) use the first linear's parameter. A layer's experts have `experts.lora_gate_up_A`
[experts, rank, in], `experts.lora_gate_up_B` [experts, out, rank] and the corresponding `down`
parameters, with one factor per expert. FSDP2 shards them along the same rows and experts as the
weights, so a rank merges its part of a weight using its own part of B. The only factors that must
be gathered are the A factors of linears.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridflow.models.causal import checkpoint_views, expert_names
from hybridflow.models.lora import AdapterMap, MergedCopies, names_of, start_gradient

_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<linear>\w+)\.weight")
_STACKED = re.compile(r"(?P<experts>.*\.experts)\.lora_(?P<part>gate_up|down)_(?P<factor>[AB])")


class Adapters:
    """All adapters of a model. Attaching them freezes all other parameters."""

    def __init__(self, described: AdapterMap, causal: Any) -> None:
        """Attach the factors to `causal`, which is still on the meta device."""
        self.map = described
        self._model_type = str(causal.config.model_type)
        self._pairs = described.served().factors
        self._merged = MergedCopies()
        _, _, down = expert_names(self._model_type)
        causal.requires_grad_(False)
        stacked = set()
        for weight in self._pairs:
            if found := _EXPERT.fullmatch(weight):
                part = "down" if found["linear"] == down else "gate_up"
                stacked.add((_module(found["experts"]), part))
            else:
                self._adapt_linear(causal, weight)
        for name, part in sorted(stacked):
            self._adapt_experts(causal.get_submodule(name), part)
        causal.model.embed_tokens.register_forward_hook(start_gradient)

    def _adapt_linear(self, causal: Any, weight: str) -> None:
        a, b = self._pairs[weight]
        linear = causal.get_submodule(_module(weight.removesuffix(".weight")))
        first = causal.get_submodule(_module(a.removesuffix(".lora_A.weight")))
        shapes = self.map.tensors()
        if first is linear:
            linear.register_parameter("lora_A", _parameter(shapes[a]))
        linear.register_parameter("lora_B", _parameter(shapes[b]))
        scale = self.map.scale

        def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
            low = F.linear(inputs[0], first.lora_A) * scale
            return output + F.linear(low, module.lora_B)

        linear.register_forward_hook(add)

    def _adapt_experts(self, experts: Any, part: str) -> None:
        count, rows, columns = getattr(experts, f"{part}_proj").shape
        rank = self.map.config.rank
        experts.register_parameter(f"lora_{part}_A", _parameter((count, rank, columns)))
        experts.register_parameter(f"lora_{part}_B", _parameter((count, rows, rank)))
        before, after = _with_adapter(part, self.map.scale)
        experts.register_forward_pre_hook(before)
        # recomputation ends a forward pass with an exception
        experts.register_forward_hook(after, always_call=True)

    # ---- names

    def facts(self) -> dict[str, Any]:
        """Return the adapter settings for a checkpoint's manifest."""
        return self.map.facts()

    @staticmethod
    def is_factor(name: str) -> bool:
        """Return True if the parameter with this name contains adapter factors."""
        return ".lora_" in name

    def views(self, name: str, tensor: Tensor, first: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT name, view) for each factor in a parameter, or in a range of its rows.

        For stacked experts, `first` is the index of the first expert.
        """
        found = _STACKED.fullmatch(name)
        if found is None:
            yield f"{name}.weight", tensor
            return
        stacked = f"{found['experts']}.{found['part']}_proj"
        if found["factor"] == "B":
            for weight, view in checkpoint_views(self._model_type, stacked, tensor, first):
                _, b = names_of(weight)
                yield b, view
            return
        # gate and up share the A of gate: name the first of `parts` weights of each expert
        parts = 2 if found["part"] == "gate_up" else 1
        named = torch.empty(len(tensor), parts, 1, device="meta")
        views = checkpoint_views(self._model_type, stacked, named, first)
        weights = [weight for weight, _ in views]
        for weight, factor in zip(weights[::parts], tensor, strict=True):
            a, _ = names_of(weight)
            yield a, factor

    # ---- values

    @torch.no_grad()
    def fill(self, held: Mapping[str, Tensor], starts: Mapping[str, tuple[int, int]]) -> None:
        """Set the initial values of this rank's factors. `starts` maps each factor's name to (first
        row, number of rows).
        """
        for name, tensor in held.items():
            first, _ = starts[name]
            tail = (0,) * (tensor.dim() - 1)
            values = self.map.read(name, (first, *tail), tuple(tensor.shape))
            tensor.copy_(values)

    @torch.no_grad()
    def merged(
        self,
        base: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        sharded: Mapping[str, DTensor],
    ) -> dict[str, Tensor]:
        """Return this rank's part of every adapted weight with its adapter added. Collective.

        The returned buffers are reused: they are valid until the next call or `release`.

        Args:
            base, held: this rank's parts of the weights and of the factors.
            sharded: the parameters of the factors.
        """
        whole = {}
        for name, parameter in sharded.items():
            if name.endswith(".lora_A"):
                whole[f"{name}.weight"] = parameter.full_tensor()
        for weight, (a, b) in self._pairs.items():
            if weight not in base:
                continue
            factor = whole[a] if a in whole else held[a]
            self._merged.add(weight, base[weight], factor, held[b], self.map.scale)
        return self._merged.tensors()

    def merged_bytes(self, base: Mapping[str, Tensor]) -> int:
        """Return the size in bytes of the merged copies on this rank."""
        return sum(base[weight].nbytes for weight in self._pairs if weight in base)

    def release(self) -> None:
        """Free the memory of the merged copies."""
        self._merged.release()


def _module(name: str) -> str:
    """Return the name that transformers uses for a checkpoint's module."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def _parameter(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def _with_adapter(
    part: str, scale: float
) -> tuple[Callable[[Any, Any], None], Callable[..., None]]:
    """Return hooks that replace the experts' weight W with W + scale * B A during their forward
    pass."""
    name = f"{part}_proj"

    def before(experts: Any, inputs: Any) -> None:
        a = experts._parameters[f"lora_{part}_A"]
        b = experts._parameters[f"lora_{part}_B"]
        weight = experts._parameters[name]
        # an attribute of the instance hides the parameter of the same name
        vars(experts)[name] = torch.baddbmm(weight, b, a, alpha=scale)

    def after(experts: Any, inputs: Any, output: Any) -> None:
        vars(experts).pop(name, None)

    return before, after
