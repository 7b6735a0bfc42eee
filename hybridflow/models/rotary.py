"""Rotary position embeddings as configured in config.json: frequencies, and YaRN's attention
factors.

The formulas follow transformers' `modeling_rope_utils.py`: linear position interpolation (arXiv
2306.15595), YaRN (arXiv 2309.00071), and Llama 3.1's interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ModelError

if TYPE_CHECKING:
    import torch  # imported lazily: planning does not need torch

# required settings of each rope_type
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dim` elements of each head.

    Attributes:
        dim: number of rotated elements.
        theta: base of the wavelengths.
        kind: transformers' rope_type.
        share: rotated fraction of each head.
        original: number of positions in pre-training; YaRN and Llama 3.1 scale relative to it.
        settings: the settings of `kind` in config.json.
        query_growth: queries are multiplied by 1 + query_growth * ln(1 + floor(position /
            original)); 0 disables this scaling.
        sections: number of frequencies per position axis (frame, row, column), which are
            interleaved; empty if a position is a single number.
    """

    dim: int
    theta: float
    kind: str = "default"
    share: float = 1.0
    original: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    query_growth: float = 0.0
    sections: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        hf: Mapping[str, Any],
        head_dim: int,
        *,
        theta: float,
        positions: int,
        partial: float | None = None,
    ) -> Rotary:
        """Read the settings from a config.json.

        They may be at the top level, in `rope_scaling` or in `rope_parameters` (transformers 5).

        Args:
            hf: the contents of config.json.
            head_dim: number of elements of a head.
            theta, positions: the family's defaults for rope_theta and max_position_embeddings.
            partial: the family's default for the rotated fraction of each head; None if the family
                always rotates whole heads.

        Raises:
            ModelError: unsupported rope_type, a missing setting, or partial rotation in a family
                that does not support it.
        """
        settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        kind = str(settings.get("rope_type") or settings.get("type") or "default")
        model = f"the config of model_type {hf.get('model_type')}"
        if kind not in _NEEDS or any(isinstance(value, Mapping) for value in settings.values()):
            what = (
                f"rope_type {kind!r}"
                if kind not in _NEEDS
                else "separate rotary settings for each kind of layer"
            )
            raise ModelError(
                f"{model} has {what}, which is not supported; use one of {', '.join(_NEEDS)}"
            )
        missing = [name for name in _NEEDS[kind] if settings.get(name) is None]
        if missing:
            raise ModelError(f"{model} has rope_type {kind!r} without {', '.join(missing)}")
        share = _first(
            settings.get("partial_rotary_factor"), hf.get("partial_rotary_factor"), partial, 1.0
        )
        if partial is None and share != 1.0:
            raise ModelError(
                f"{model} has partial_rotary_factor={share}, which is not supported; remove it"
            )
        longest = _first(hf.get("max_position_embeddings"), positions)
        original = _first(
            hf.get("original_max_position_embeddings"),
            settings.get("original_max_position_embeddings"),
            longest,
        )
        base = _first(settings.get("rope_theta"), hf.get("rope_theta"), theta)
        return cls(int(head_dim * share), float(base), kind, float(share), int(original), settings)

    def frequencies(self) -> torch.Tensor:
        """Return the fp32 frequencies [dim / 2] in radians per position."""
        import torch

        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        if self.kind == "yarn":
            return self._yarn(self.theta**exponents)
        plain = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return plain / self.settings["factor"]
        return self._llama3(plain) if self.kind == "llama3" else plain

    def axes(self) -> list[int]:
        """Return the axis (0 frame, 1 row, 2 column) of each of the dim / 2 frequencies."""
        found = [0] * (self.dim // 2)
        for axis in (1, 2):
            for number in range(axis, min(3 * self.sections[axis], len(found)), 3):
                found[number] = axis
        return found

    @property
    def attention_factor(self) -> float:
        """Factor by which cosines and sines are multiplied."""
        if self.kind != "yarn":
            return 1.0
        settings = self.settings
        factor = self.settings["factor"]
        if settings.get("attention_factor") is not None:
            return float(settings["attention_factor"])
        over = settings.get("mscale")
        under = settings.get("mscale_all_dim")
        return (
            _concentration(factor, over) / _concentration(factor, under)
            if over and under
            else _concentration(factor)
        )

    def _yarn(self, wavelengths: torch.Tensor) -> torch.Tensor:
        """Keep fast rotations and interpolate slow ones, with a linear ramp over the dimensions in
        between."""
        import torch

        low, high = (
            self._dimension_of(self.settings.get(name) or rotations) for name, rotations in _BETAS
        )
        if self.settings.get("truncate", True):
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.dim - 1)
        steps = torch.arange(self.dim // 2, dtype=torch.float32) - low
        keep = 1 - torch.clamp(steps / (high - low if high != low else 0.001), 0, 1)
        return 1.0 / (self.settings["factor"] * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep

    def _dimension_of(self, rotations: float) -> float:
        """Return the dimension that completes this many rotations within the original length."""
        return (
            self.dim
            * math.log(self.original / (rotations * 2 * math.pi))
            / (2 * math.log(self.theta))
        )

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        import torch

        factor, slow, fast = (self.settings[name] for name in _NEEDS["llama3"])
        wavelengths = 2 * math.pi / plain
        mixed = (self.original / wavelengths - slow) / (fast - slow)
        scaled = torch.where(wavelengths > self.original / slow, plain / factor, plain)
        between = (wavelengths >= self.original / fast) & (wavelengths <= self.original / slow)
        return torch.where(between, (1 - mixed) * scaled / factor + mixed * scaled, scaled)


def rotaries_by_kind(
    hf: Mapping[str, Any], head_dim: int, *, theta: float, local_theta: float, positions: int
) -> tuple[Rotary, Rotary]:
    """Return the rotary embeddings of full-attention layers and of sliding-window layers.

    `rope_parameters` has separate settings for each kind of layer. Without it, `rope_scaling` and
    `rope_theta` apply only to full-attention layers.

    Args:
        hf: the contents of config.json.
        head_dim: number of elements of a head.
        theta, local_theta: the family's defaults for rope_theta of the two kinds.
        positions: the family's default for max_position_embeddings.

    Raises:
        ModelError: same as `Rotary.of`; also if `rope_parameters` has settings that belong to
            neither kind.
    """
    given = hf.get("rope_parameters") or {}
    if not all(isinstance(settings, Mapping | None) for settings in given.values()):
        raise ModelError(
            f"the config of model_type {hf.get('model_type')} has one set of rope_parameters, "
            "which is not supported; add one set each for full_attention and sliding_attention"
        )
    scaling = hf.get("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise ModelError(
            f"the config of model_type {hf.get('model_type')} has rope_scaling.type, which "
            "transformers ignores in this family; rename it to rope_type"
        )
    rest = {name: hf[name] for name in hf if name not in ("rope_parameters", "rope_scaling")}
    full = {**(given.get("full_attention") or {}), **scaling}
    local = dict(given.get("sliding_attention") or {})
    found = []
    for settings, base in (
        (full, hf.get("rope_theta") or theta),
        (local, local_theta),
    ):
        one = {**rest, "rope_parameters": {"rope_theta": base, **settings}}
        found.append(Rotary.of(one, head_dim, theta=base, positions=positions))
    return found[0], found[1]


_BETAS = (("beta_fast", 32.0), ("beta_slow", 1.0))


def _concentration(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
