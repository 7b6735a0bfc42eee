"""Axes for the report's charts: round ticks, tick labels, and the mapping from values to pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic mapping of [low, high] to pixels [start, end], with ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel position of a value."""
        low = self.low
        high = self.high
        if self.log:
            low, high, value = map(math.log10, (low, high, value))
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    def text(self, tick: float, percent: bool = False) -> str:
        """Return the tick's label, with enough digits to distinguish it from its neighbours."""
        if self.log:
            return f"{tick:g}" if 0.001 <= tick < 1e5 else _exponent(tick)
        step = abs(tick) or 1.0
        if len(self.ticks) > 1:
            step = abs(self.ticks[1] - self.ticks[0])
        if percent:
            return f"{tick * 100:.{_decimals(step * 100)}f} %"
        largest = max(map(abs, self.ticks))
        if largest and (largest < 1e-3 or largest >= 1e6):
            return _exponent(tick)
        return f"{tick:,.{_decimals(step)}f}"


def linear(
    values: Iterable[float], start: float, end: float, include: Iterable[float] = ()
) -> Scale:
    """Return a scale that covers `values` and `include` and whose ends are round numbers."""
    found = [*values, *include]
    low = min(found)
    high = max(found)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        pad = abs(low) * 0.1 or 1.0
        high += pad
        # The axis of a constant non-negative series starts at zero.
        low = 0.0 if low >= 0 else low - pad
    step = nice_step(high - low, 4)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    ticks = _multiples(step, first, last)
    return Scale(ticks[0], ticks[-1], start, end, ticks)


def steps(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a scale for step numbers that ends at the last step and has integer ticks."""
    found = list(values)
    low = min(found)
    high = max(found)
    if low == high:
        return Scale(low - 1, high + 1, start, end, (low,))
    step = max(1.0, nice_step(high - low, 6))
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return Scale(low, high, start, end, _multiples(step, first, last))


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """Return a logarithmic scale over positive values; ends and ticks are powers of ten."""
    found = list(values)
    first = math.floor(math.log10(min(found)) + 1e-9)
    last = math.ceil(math.log10(max(found)) - 1e-9)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 6)
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Scale(10.0**first, 10.0**last, start, end, ticks, log=True)


def nice_step(span: float, count: int) -> float:
    """Return 1, 2 or 5 times a power of ten such that about `count` steps cover the span."""
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if raw <= factor * power * (1 + 1e-9))


def _multiples(step: float, first: int, last: int) -> tuple[float, ...]:
    """Return `step` times each number from `first` to `last`."""
    return tuple(index * step for index in range(first, last + 1))


def _decimals(step: float) -> int:
    """Return how many digits after the point distinguish numbers that are `step` apart."""
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _exponent(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, power = f"{value:.3e}".split("e")
    digits = mantissa.rstrip("0").rstrip(".")
    return f"{digits}e{int(power)}"
