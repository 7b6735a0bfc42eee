"""The coefficient of the KL penalty in the reward, either fixed or adapted to a target
divergence."""

from __future__ import annotations


class KlControl:
    """The KL coefficient. With a `target`, it adapts to the measured divergence (arXiv 1909.08593,
    section 2.2).

    After every step, value *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon.
    """

    def __init__(
        self, coefficient: float, target: float | None = None, horizon: int = 10_000
    ) -> None:
        """Start from the given coefficient, which stays constant without a target."""
        self.value = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to the mean divergence over the samples of a step."""
        if self.target is not None:
            self.value *= 1.0 + min(max(kl / self.target - 1.0, -0.2), 0.2) * samples / self.horizon
