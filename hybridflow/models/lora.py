"""Description of low-rank adapters as data: the adapted linears, and the sharding of their two
factors.

An adapted linear uses the weight W + scale * B A, where scale = alpha / rank, A [rank, in], B [out,
rank] (arXiv 2106.09685). The factors of a Megatron linear are sharded like the linear: B's rows
like the weight's rows, A's columns like its columns. Both therefore follow from the family's map of
the weight, without separate index arithmetic: each local row of a fused projection (queries, keys
and values interleaved by group, gate stacked on up) maps to the Hugging Face tensor that it belongs
to.

Names are PEFT's: `model.layers.0.self_attn.q_proj.lora_A.weight`. HF linears that Megatron fuses
share one A. It is stored under the name of the first linear; the names of the others are `aliases`.

Each routed expert has its own factors, named after the expert's linears in published checkpoints:
`model.layers.0.mlp.experts.3.down_proj.lora_B.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybridflow.config.schema import LoraConfig
from hybridflow.errors import ModelError
from hybridflow.models import lora_targets
from hybridflow.models.family import Family
from hybridflow.models.layout import Coordinates, LocalTensor, Piece
from hybridflow.models.served_adapters import ServedAdapters
from hybridflow.models.weights import RandomWeights

_STRIP = 4 << 20  # number of weight elements merged at a time, in fp32


@dataclass(frozen=True)
class AdaptedWeight:
    """A rank's weight and its factors `a` [rank, in] and `b` [out, rank].

    `cut` is the dimension of the weight that is split by tensor parallelism (for routed experts, by
    expert tensor parallelism).
    """

    weight: LocalTensor
    a: LocalTensor
    b: LocalTensor
    cut: Literal["rows", "columns", "nothing"]

    @property
    def module(self) -> str:
        """Megatron's name of the linear. All local experts of a layer share a name."""
        return lora_targets.module_of(self.weight)[0]

    @property
    def is_routed(self) -> bool:
        """True for the weight of a routed expert."""
        return lora_targets.is_routed(lora_targets.target_of(self.weight))


class AdapterMap:
    """The adapters of a model.

    Args:
        family: the model's family.
        config: the adapter settings, with `rank` at least 1.
        seed: seed of A's initial values.

    Raises:
        ModelError: a listed target matches no linear of the model.
    """

    def __init__(self, family: Family, config: LoraConfig, seed: int) -> None:
        self.config = config
        self.scale = config.alpha / config.rank
        has = lora_targets.targets_of(family)
        if missing := [target for target in config.targets if target not in has]:
            raise ModelError(
                f"actor.lora.targets: the model has no {', '.join(missing)}; choose from "
                f"{', '.join(has)}"
            )
        # HF tensor -> the unsharded Megatron weight that contains it
        self._uncut = {
            piece.source: local
            for local in family.local_tensors(Coordinates())
            if lora_targets.is_adapted(local, config.targets)
            for piece in local.pieces
        }
        self._rows = {name: shape[0] for name, shape in family.tensors().items()}
        # variance 1 / (3 in), like PEFT's kaiming_uniform(a=sqrt(5)); the layers' inputs have unit
        # variance per element
        self._noise = RandomWeights(
            {name: shape for name, shape in self.tensors().items() if is_a(name)}, seed, 1.0
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return {factor: shape}, excluding `aliases`."""
        rank = self.config.rank
        shapes: dict[str, tuple[int, ...]] = {}
        for source, uncut in self._uncut.items():
            shapes[self._a_of(source)] = (rank, uncut.shape[1])
            shapes[names_of(source)[1]] = (self._rows[source], rank)
        return shapes

    def aliases(self) -> dict[str, str]:
        """Return {A factor of an HF linear: name of the A factor under which it is stored}."""
        pairs = {names_of(source)[0]: self._a_of(source) for source in self._uncut}
        return {name: kept for name, kept in pairs.items() if name != kept}

    def local(self, tensors: Iterable[LocalTensor]) -> list[AdaptedWeight]:
        """Return the rank's weights that have adapters."""
        adapted: list[AdaptedWeight] = []
        for local in tensors:
            if any(piece.source in self._uncut for piece in local.pieces):
                adapted.append(self._adapted(local))
        return adapted

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a region of a factor's initial values, which do not depend on the layout.

        B is zero, so that training starts exactly at the base model.
        """
        if not is_a(name):
            return torch.zeros(shape)
        return self._noise.read(name, start, shape) / math.sqrt(3 * self._noise.tensors[name][1])

    def served(self) -> ServedAdapters:
        """Return the description of the adapters for engines that do not merge them into the
        weights."""
        factors = {source: (self._a_of(source), names_of(source)[1]) for source in self._uncut}
        return ServedAdapters(self.scale, factors, self.tensors())

    def num_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(map(math.prod, self.tensors().values()))

    def describe(self) -> str:
        """Format the adapter settings as one line."""
        facts = self.facts()
        targets = ", ".join(facts["targets"])
        return f"rank {facts['rank']}, alpha {facts['alpha']:g} on {targets}"

    def facts(self) -> dict[str, Any]:
        """Return the adapter settings for a checkpoint's manifest."""
        targets = dict.fromkeys(map(lora_targets.target_of, self._uncut.values()))
        return {"rank": self.config.rank, "alpha": self.config.alpha, "targets": list(targets)}

    def _a_of(self, source: str) -> str:
        return names_of(self._uncut[source].pieces[0].source)[0]

    def _adapted(self, weight: LocalTensor) -> AdaptedWeight:
        rank = self.config.rank
        rows, columns = weight.shape
        uncut = self._uncut[weight.pieces[0].source]
        a = {}
        b = []
        for piece in weight.pieces:
            row, column = piece.source_start
            local_row, local_column = piece.local_start
            high, wide = piece.shape
            one = Piece(self._a_of(piece.source), (0, column), (0, local_column), (rank, wide))
            a[one.local_start] = one
            b.append(Piece(names_of(piece.source)[1], (row, 0), (local_row, 0), (high, rank)))
        module, expert = lora_targets.module_of(weight)
        return AdaptedWeight(
            weight,
            LocalTensor(f"{module}.lora.A{expert}", (rank, columns), tuple(a.values())),
            LocalTensor(f"{module}.lora.B{expert}", (rows, rank), tuple(b)),
            "rows"
            if rows < uncut.shape[0]
            else "columns"
            if columns < uncut.shape[1]
            else "nothing",
        )


def names_of(source: str) -> tuple[str, str]:
    """Return PEFT's names of A and B for the HF tensor `X.weight`."""
    module = source.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def module_of(name: str) -> str:
    """Return the HF linear to which the factor with this PEFT name belongs."""
    return name.removesuffix(".weight").rpartition(".")[0]


def is_a(name: str) -> bool:
    """Return True if this PEFT name denotes an A factor."""
    return name.endswith(".lora_A.weight")


def is_factor(name: str) -> bool:
    """Return True if this PEFT name denotes an A or B factor."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def is_adapter(parameter: str) -> bool:
    """Return True if this Megatron name denotes an adapter factor."""
    return ".lora." in parameter


def merge(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute weight [o, i] + scale * b [o, r] @ a [r, i] in fp32, rounded once.

    The result is written to `out` or a new tensor of the weight's dtype. Works in strips to limit
    the fp32 temporary. Results for the same region may differ in the last fp32 bit if the sharding
    differs.
    """
    out = torch.empty_like(weight) if out is None else out
    wide = a.float()
    rows = max(1, _STRIP // max(1, weight.shape[1]))
    for low in range(0, len(weight), rows):
        strip = slice(low, low + rows)
        out[strip] = torch.addmm(weight[strip].float(), b[strip].float(), wide, alpha=scale)
    return out


class MergedCopies:
    """Copies of adapted weights with their adapters added. The buffers are reused from one merge to
    the next."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def add(
        self, name: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> None:
        """Merge the adapters into a copy of one weight (see `merge`)."""
        if name not in self._held:
            self._held[name] = torch.empty_like(weight)
        self._held[name].untyped_storage().resize_(weight.nbytes)
        merge(weight, a, b, scale, self._held[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the copies keyed by name. They are valid until the next `add` or `release`."""
        return dict(self._held)

    def release(self) -> None:
        """Free the memory of the copies. The tensor objects remain valid for senders that keep
        references, but are empty until the next `add`."""
        for tensor in self._held.values():
            tensor.untyped_storage().resize_(0)


def start_gradient(embedding: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook that makes the embedding output require a gradient.

    With a frozen embedding, no tensor before the first adapter requires a gradient. However, a
    recomputed layer propagates gradients only if its input requires one
    (megatron/core/tensor_parallel/random.py:564 in 0.16), and the FSDP backend checks this gradient
    for finiteness.
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output


def peft_config(
    facts: Mapping[str, Any],
    modules: Iterable[str],
    tensors: Iterable[str],
    *,
    in_full: bool = False,
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Args:
        facts: `AdapterMap.facts`.
        modules: HF names of the adapted linears.
        tensors: all tensors of the model. If an unadapted tensor has the same last name component
            as an adapted one, the adapted module is listed by its full name.
        in_full: whether every module is listed by its full name, because `tensors` are not all.
    """
    adapted = set(modules)
    others = set(map(_last, adapted)) if in_full else set()
    for name in tensors:
        if name.removesuffix(".weight") not in adapted:
            others.add(_last(name.removesuffix(".weight")))
    targets = {_last(name) if _last(name) not in others else name for name in adapted}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": facts["rank"],
        "lora_alpha": facts["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": sorted(targets),
        "base_model_name_or_path": None,
        "inference_mode": True,
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
