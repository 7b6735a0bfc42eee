"""The Megatron policy with what the policy's worker asks of every backend (`workers.backend.Backend`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.device.residency import Part
from hybridflow.mcore import bootstrap, checkpoint, hf_export, parallel
from hybridflow.mcore.model_parts import model_parts
from hybridflow.mcore.policy import Policy
from hybridflow.reshard.layout import Catalog, Layout, megatron_layout


class MegatronPolicy(Policy):
    """`Policy`, and its place in the process and on the disk. Every method is a collective."""

    def mesh_position(self) -> tuple[int, int, bool]:
        """See `parallel.data_parallel_position`."""
        return parallel.data_parallel_position()

    def describe(self) -> dict[str, str]:
        """What computes here, for the run's record."""
        found = {"backend": bootstrap.backend_name(), "megatron_core": bootstrap.MEGATRON_VERSION}
        if self.adapters:
            facts = self.adapters.facts()
            found["lora"] = f"rank {facts['rank']}, alpha {facts['alpha']:g} on {', '.join(facts['targets'])}"
        return found

    def memory_parts(self) -> Mapping[Part, Callable[[], Iterable[torch.Tensor]]]:
        """For `Residency`."""
        return model_parts(self)

    def weight_layout(self) -> Callable[[Catalog], Layout]:
        """Asks all ranks for their coordinates; the returned function builds the layout."""
        ranks, dtype = parallel.all_coordinates(), str(self.dtype).removeprefix("torch.")
        return lambda catalog: megatron_layout(self.family, ranks, dtype, catalog)

    def saver(self, timeout_s: float) -> checkpoint.Saver:
        """Saves of this policy."""
        return checkpoint.Saver(self, timeout_s)

    def load(self, folder: Path) -> None:
        """See `checkpoint.load`."""
        checkpoint.load(self, folder)

    def export(self, folder: Path, hf_config: Mapping[str, Any], tokenizer: Path | None) -> None:
        """See `hf_export.export`."""
        hf_export.export(self, folder, hf_config, tokenizer)
