"""Policies on the ranks of a test, their batches and their weights: the same ones whatever the
layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import LoraConfig, ParallelConfig
from hybridflow.device.platform import Platform

FULL = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence": True}
FULL_DENSE = {"tensor": 2, "pipeline": 2, "sequence": True}


def batch_of(num: int, seed: int, vocab: int = 51) -> DataProto:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, vocab, rng.integers(1, 9)) for _ in range(num)]
    responses = [rng.integers(2, vocab, rng.integers(1, 7)) for _ in range(num)]
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(prompts, np.int64),
            "response_ids": Jagged.from_rows(responses, np.int64),
        }
    )


def weights_of(family: Any, std: float = 0.2) -> Any:
    """Random weights that do not depend on the layout."""
    from hybridflow.models.weights import RandomWeights, zero_centered_norms

    class Shaken(RandomWeights):
        """Norms and biases differ from one and zero, so that a dropped or swapped one shows."""

        def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            values = super().read(name, start, shape)
            if len(shape) > 1:
                return values
            digest = sum(map(ord, name))
            full = torch.randn(self.tensors[name], generator=torch.Generator().manual_seed(digest))
            return values + 0.1 * full[start[0] : start[0] + shape[0]]

    return Shaken(family.tensors(), 5, std, zero_centered_norms(family))


def policy_of(
    parallel: dict[str, Any],
    hf: dict[str, Any],
    std: float = 0.2,
    dtype: str = "float32",
    lora: dict[str, Any] | None = None,
    backend: str | None = None,
    heads: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    from megatron.core import parallel_state

    from hybridflow.mcore import parallel as groups
    from hybridflow.mcore.head_training import HeadSettings
    from hybridflow.mcore.policy import Policy
    from hybridflow.models import family_of
    from hybridflow.models.lora import AdapterMap

    config = ParallelConfig(**parallel)
    if not parallel_state.model_parallel_is_initialized():
        groups.initialize(
            config, seed=1, backend=backend or Platform.detect().collective_backend, timeout_s=180
        )
    family = family_of(hf, mtp=heads is not None)
    if heads is not None:
        options["heads"] = HeadSettings(**heads)
    if lora is not None:
        options["lora"] = AdapterMap(family, LoraConfig(**lora), seed=3)
    return Policy(family, config, dtype, weights_of(family, std), **options)


def share_of(batch: DataProto) -> DataProto:
    from hybridflow.mcore.parallel import data_parallel_position

    rank, size, _ = data_parallel_position()
    return batch.chunk(size)[rank]


def digest(policy: Any) -> dict[str, list[float]]:
    """Every HF tensor reduced to (sum, sum of squares), each element counted once; the same on all
    ranks."""
    from hybridflow.mcore.parallel import all_coordinates
    from hybridflow.saving.ownership import megatron_owners

    shares: dict[str, Any] = {}
    parameters = policy.parameters()
    for name, pieces in megatron_owners(policy.family, all_coordinates()).items():
        share = shares.setdefault(name, torch.zeros(2, dtype=torch.float64))
        for owned in pieces:
            if owned.rank == dist.get_rank():
                values = parameters[owned.parameter][owned.piece.slices()].double()
                share += torch.stack([values.sum(), (values**2).sum()])
    stacked = torch.stack([shares[name] for name in sorted(shares)])
    dist.all_reduce(stacked)
    return dict(zip(sorted(shares), stacked.tolist(), strict=True))
