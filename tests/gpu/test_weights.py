"""Weights of an engine on the trainer's GPU: an update without weights changes nothing, and weights that came over
memory of the GPU are those of a cold start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridflow.device.platform import Platform
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import weights_checksum
from tests.gpu.weights import after_sleep, cold_start, through_empty_updates
from tests.models import SYNC_MOE

pytestmark = pytest.mark.skipif(Platform.detect().kind != "cuda", reason="needs a GPU")
CLOSE = 1e-3  # of float32 on a GPU beside transformers on the CPU


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncWorld]:
    engine = {"tensor": 1, "mem_fraction_static": 0.2, "sleep_while_training": True}
    built = SyncWorld(SYNC_MOE, {"ranks": 1}, [engine], tmp_path_factory.mktemp("weights"))
    built.configure(transport="cuda_ipc")
    try:
        yield built
    finally:
        built.close()


def test_an_update_without_weights_leaves_the_checksum(world: SyncWorld) -> None:
    world.sync.sync(world.train(1))
    before, *after = through_empty_updates(world, 0)
    assert after == [before, before]


def test_weights_of_a_colocated_sync_are_those_of_a_cold_start(world: SyncWorld) -> None:
    for seed in (2, 3):
        after_sleep(world, seed)
        assert world.difference(0, seed) <= CLOSE
        received = weights_checksum(world.client(0))
        assert cold_start(world, 0, seed) == received
