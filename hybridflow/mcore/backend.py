"""A Megatron model that implements the backend interface (`workers.backend.Backend`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.device.residency import Part
from hybridflow.mcore import bootstrap, checkpoint, hf_export, parallel
from hybridflow.mcore.model import load_weights
from hybridflow.mcore.model_parts import model_parts
from hybridflow.mcore.policy import Policy
from hybridflow.models import Family
from hybridflow.models.layout import LocalTensor
from hybridflow.models.weights import WeightSource
from hybridflow.reshard.layout import Catalog, Layout, megatron_layout


class MegatronPolicy(Policy):
    """Extends `Policy` with mesh position, memory parts, layout, checkpoints and export. Every
    method is a collective.

    Attributes:
        serves_heads: whether engines draft with the policy's prediction heads.
    """

    serves_heads = False

    def mesh_position(self) -> tuple[int, int, bool]:
        """Return (data-parallel rank, data-parallel size, True if this rank reports its group's
        results)."""
        return parallel.data_parallel_position()

    def describe(self) -> dict[str, str]:
        """Return the backend's name and versions, for the run's environment record."""
        found = {"backend": bootstrap.backend_name(), "megatron_core": bootstrap.MEGATRON_VERSION}
        if self.adapters:
            found["lora"] = self.adapters.map.describe()
        return found

    def memory_parts(self) -> Mapping[Part, Callable[[], Iterable[torch.Tensor]]]:
        """Return, for each memory part, a function that lists this rank's tensors."""
        return model_parts(self)

    def weight_layout(self) -> Callable[[Catalog], Layout]:
        """Gather the coordinates of all ranks, and return a function that builds the weight layout
        from a catalog.
        """
        ranks = parallel.all_coordinates()
        dtype = str(self.dtype).removeprefix("torch.")
        return lambda catalog: megatron_layout(self.served, ranks, dtype, catalog, self._factors)

    def _factors(self, tensors: list[LocalTensor]) -> list[LocalTensor]:
        """Return the adapter factors that a rank with these weights sends."""
        if self.adapters is None or self.served_adapters is None:
            return []
        return [local for one in self.adapters.map.local(tensors) for local in (one.a, one.b)]

    @property
    def served(self) -> Family:
        """The model family whose tensors the engines store. It includes prediction heads only if
        the engines draft with them.
        """
        return self.family if self.serves_heads else self.trunk

    def saver(self, timeout_s: float) -> checkpoint.Saver:
        """Return the object that writes this model's checkpoints."""
        return checkpoint.Saver(self, timeout_s)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint in place."""
        checkpoint.load(self, folder)

    def export(
        self,
        folder: Path,
        hf_config: Mapping[str, Any],
        tokenizer: Path | None,
        *,
        source: Path | None = None,
    ) -> list[str]:
        """Export the model to a folder in Hugging Face format."""
        return hf_export.export(self, folder, hf_config, tokenizer, source=source)

    def load_from(self, source: WeightSource) -> None:
        """Replace all weights and drop the optimizer. Call `set_optimizer` again afterwards.

        Raises RuntimeError if the policy shares the weights of its base.
        """
        if self.base is not None:
            raise RuntimeError(
                "load_from would change the shared weights of the base policy; call it on the base"
            )
        load_weights(self.stages, self.family, source, self.heads)
        self.optimizer = None
