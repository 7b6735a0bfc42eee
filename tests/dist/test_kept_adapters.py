"""SGLang engines (TP 1 and TP 2) that keep adapters next to their weights: the weights arrive once,
then adapters alone; an engine that has restarted gets both again.

The oracle is transformers on the trainer's merged export.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import LoraConfig
from hybridflow.models import family_of
from hybridflow.models.lora import AdapterMap
from tests.dist.harness.rounding import FACTOR
from tests.dist.harness.sync_world import PATIENT, SyncWorld
from tests.models import SYNC_MOE

pytestmark = [pytest.mark.slow, pytest.mark.full]
LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0, "sync": "adapter"}
SHAPE = {"ranks": 4, "tensor": 2, "pipeline": 2, "expert": 2, "sequence": True, "lora": LORA}
TENSORS = (1, 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncWorld]:
    folder = tmp_path_factory.mktemp("kept")
    built = SyncWorld(SYNC_MOE, SHAPE, TENSORS, folder, kind="megatron", sync=PATIENT)
    try:
        yield built
    finally:
        built.close()


def factor_bytes(tensors: int) -> int:
    """What a TP engine's ranks hold of the factors: of qkv all of A and a share of B, of the output
    projection a share of A and all of B."""
    shapes = AdapterMap(family_of(SYNC_MOE), LoraConfig(**LORA), seed=3).tensors()
    total = 0
    for name, shape in shapes.items():
        is_cut = name.endswith("lora_A.weight") == ("o_proj" in name)
        total += 4 * prod(shape) * (1 if is_cut else tensors)
    return total


def step(world: SyncWorld, seed: int, folder: Path) -> Any:
    """Train, sync and export; every engine that took part computes what was exported."""
    assert min(world.senders.command("step", seed=seed)) > 0
    world.version += 1
    report = world.sync(world.version)
    world.senders.command("export", folder=str(folder))
    for number in range(len(TENSORS)):
        if f"engine-{number}" not in report.stale:
            assert world.difference(number, folder) <= FACTOR
    return report


def test_adapters_alone_reach_engines_that_have_the_weights(
    world: SyncWorld, tmp_path: Path
) -> None:
    facts = world.senders.facts
    assert facts is not None and facts.adapters is not None
    assert facts.adapters.nbytes == tuple(map(factor_bytes, TENSORS))
    assert f"adapters alone {sum(facts.adapters.nbytes) / 1e6:.1f} MB" in world.plan_line
    sent = [step(world, seed, tmp_path / str(seed)).nbytes for seed in (1, 2, 3)]
    assert sent == [sum(facts.nbytes), *[sum(facts.adapters.nbytes)] * 2]


def test_an_engine_that_restarted_gets_weights_and_adapters(
    world: SyncWorld, tmp_path: Path
) -> None:
    facts = world.senders.facts
    assert facts is not None and facts.adapters is not None
    step(world, 4, tmp_path / "4")
    os.kill(world.scheduler(1), signal.SIGKILL)
    report = step(world, 5, tmp_path / "5")
    assert set(report.stale) == {"engine-1"}
    deadline = time.monotonic() + 400
    while any(state.state != "up" for state in world.states()):
        assert time.monotonic() < deadline, world.states()
        time.sleep(0.5)
    report = step(world, 6, tmp_path / "6")
    assert report.stale == {}
    assert report.nbytes == facts.adapters.nbytes[0] + facts.nbytes[1]
    assert step(world, 7, tmp_path / "7").nbytes == sum(facts.adapters.nbytes)
