"""Weights of an engine on the trainer's GPU: an update without weights changes nothing, and weights
that came over memory of the GPU are those of a cold start."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hybridflow.device.platform import Platform
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import weights_checksum
from tests.gpu.weights import after_sleep, cold_start, through_empty_updates
from tests.models import SYNC_MOE

pytestmark = pytest.mark.skipif(Platform.detect().kind != "cuda", reason="needs a GPU")
# times what float32 costs transformers on a CPU: an engine's attention on a GPU may multiply in
# TF32
CLOSE = 500


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncWorld]:
    # as in the checks beside this one: what wheels without an index have kernels for
    kernels = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
    }
    engine = {
        "tensor": 1,
        "mem_fraction_static": 0.2,
        "sleep_while_training": True,
        "extra_args": kernels,
    }
    model = {**SYNC_MOE, "head_dim": 64}
    built = SyncWorld(model, {"ranks": 1}, [engine], tmp_path_factory.mktemp("weights"))
    built.configure(transport="cuda_ipc")
    try:
        yield built
    finally:
        built.close()


def test_an_update_without_weights_leaves_the_checksum(world: SyncWorld) -> None:
    world.sync(world.train(1))
    before, *after = through_empty_updates(world, 0)
    assert after == [before, before]


def test_weights_of_a_colocated_sync_are_those_of_a_cold_start(world: SyncWorld) -> None:
    """Twenty times asleep and awake; each time nothing stays behind on the GPU."""
    asleep = []
    for seed in range(2, 22):
        asleep.append(after_sleep(world, seed))
        if seed in (2, 21):
            assert world.difference(0, seed) <= CLOSE
    received = weights_checksum(world.client(0))
    assert cold_start(world, 0, 21) == received
    print("RESULT " + json.dumps({"asleep_MiB": asleep[-1], "asleep_first_MiB": asleep[0]}))
    assert asleep[-1] <= asleep[0] + 64 and asleep[-1] <= 3 * 1024, asleep
