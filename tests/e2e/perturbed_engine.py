"""An engine kind for `rollout.engine=PATH:perturbed`: it samples with the trainer's weights and
noise added to them, as an engine of low precision does, only more. Greedy requests, those of
validation, get the trainer's weights as they are, so that the held-out accuracy is the policy's
own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import ENGINES, Completion
from hybridflow.engines.hf.engine import HfEngine, checkpoint_tensors

# standard deviation of the noise of a matrix, over that of its numbers
NOISE = "HYBRIDFLOW_TEST_NOISE"


class PerturbedEngine(HfEngine):
    """The engine `hf` with noise that is drawn anew for every version of the weights."""

    def take(self, version: str, fill: Callable[[Mapping[str, torch.Tensor]], int]) -> int:
        """Take the weights, and keep them beside those with noise."""
        done = super().take(version, fill)
        drawn = torch.Generator().manual_seed(int(version))
        self._tensors = [
            tensor for _, tensor in checkpoint_tensors(self._model) if tensor.dim() > 1
        ]
        self._exact = [tensor.clone() for tensor in self._tensors]
        scale = float(os.environ[NOISE])
        self._noisy = [
            tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=drawn)
            for tensor in self._exact
        ]
        return done

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *arguments: Any,
        **more: Any,
    ) -> list[Completion]:
        """Sample with noise, answer greedily without."""
        if sampling.temperature:
            self._write(self._noisy)
        try:
            return super().generate(prompts, sampling, *arguments, **more)
        finally:
            self._write(self._exact)

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)


ENGINES.register("perturbed", PerturbedEngine)
