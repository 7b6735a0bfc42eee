"""Stand-ins for a critic and for the policy of a run with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import CriticConfig, OptimConfig
from hybridflow.saving.manifest import say_saved
from hybridflow.trainer.protocols import Update
from hybridflow.workers.model_role import ModelWorker
from tests.unit.trainer.worlds import Immediate, World


class FakeRole(Immediate):
    """No offload is configured, so that `sleep` is none."""

    async def memory(self) -> dict[str, float]:
        return {
            "perf/max_memory_allocated_gb": 3.0,
            f"perf/offloaded_gb/{type(self).__name__}": 0.5,
        }


class Critic(FakeRole):
    """Notes its calls in the world's list; its value of a token is the token's number in the
    row."""

    def __init__(self, world: World, applied: bool = True) -> None:
        self.world = world
        self.applied = applied
        self.seen: list[DataProto] = []
        self.writes = True

    def fill(self, folder: Path) -> None:
        self.world.calls.append(f"start critic from {folder.name}")

    def set_optimizer(self, optim: OptimConfig) -> None:
        assert optim == CriticConfig().optim

    def compute_values(self, batch: DataProto) -> DataProto:
        self.world.calls.append("values")
        responses = batch.jagged("response_ids")
        return DataProto.from_columns(
            {"values": Jagged(responses.values.astype(np.float32) / 10, responses.offsets)}
        )

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        assert method is ModelWorker.update_critic and seed is not None
        self.world.calls.append("update_critic")
        self.seen.append(batch)
        return [
            Update(
                {"loss": 0.25, "critic/vf_clipfrac": 0.0, "critic/vpred_mean": 0.1},
                2.0,
                1e-4,
                self.applied,
            )
        ]

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.world.calls.append("save critic")
        folder.mkdir()
        if self.writes:
            (folder / "manifest.json").write_text("{}")
            say_saved(folder)

    async def is_saved(self) -> bool:
        return True

    def load(self, folder: Path, optim: OptimConfig) -> None:
        assert folder.is_dir() and folder.name == "critic"
        self.world.calls.append("load critic")

    def export(self, folder: Path) -> None:
        self.world.calls.append("export critic")


class PpoWorld(World):
    def export(self, folder: Path) -> None:
        self.calls.append("export")
