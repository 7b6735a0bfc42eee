"""Slices into real SGLang engines (TP 1 and TP 2), and every fault that a sync may meet.

The oracle of the weights is transformers on a folder written from the same tensors, and SGLang's
own checksum after loading that folder. After each fault an engine must answer with whole old or
whole new weights, or not at all.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.engines.base import NO_EXTRAS
from hybridflow.errors import EngineError, WeightSyncError, WorkerError
from hybridflow.models import family_of
from hybridflow.rollout.protocols import SyncReport
from hybridflow.single_controller import block_on
from hybridflow.workers import rollout
from hybridflow.workers.requests import CUT_SHORT
from tests.dist.harness.asking import generating
from tests.dist.harness.rounding import FACTOR
from tests.dist.harness.sync_world import PROMPTS, SYNC, Senders, SyncWorld
from tests.engine_weights import load_weights_from_disk, weights_checksum
from tests.gpu.weights import after_sleep, cold_start, through_empty_updates
from tests.models import SYNC_MOE

pytestmark = pytest.mark.slow
SHAPE = {"ranks": 2, "pipeline": 2}
TENSORS = (1, 2)
CLOSE = FACTOR  # of the rounding of float32


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncWorld]:
    built = SyncWorld(SYNC_MOE, SHAPE, TENSORS, tmp_path_factory.mktemp("sync"), sync=SYNC)
    try:
        yield built
    finally:
        built.close()


@pytest.fixture(autouse=True)
def as_it_was(world: SyncWorld) -> Iterator[None]:
    """Each test finds the settings of `SYNC`."""
    yield
    if world.settings != SYNC:
        world.configure()


def analytic_bytes(tensors: int) -> int:
    """What a TP engine's ranks hold of the model, by SGLang's conventions and nothing of ours:
    matrices are cut, the rest is repeated."""
    total = 0
    for name, shape in family_of(SYNC_MOE).tensors().items():
        is_cut = len(shape) == 2 and "mlp.gate.weight" not in name
        total += prod(shape) * 4 * (1 if is_cut else tensors)
    return total


def synced(world: SyncWorld, seed: int) -> SyncReport:
    return world.sync(world.train(seed))


def is_whole(world: SyncWorld, number: int, seeds: tuple[int, ...]) -> bool:
    """The engine answers with the weights of one of the seeds, or not at all."""
    if not world.answers(number):
        return True
    return any(world.difference(number, seed) <= CLOSE for seed in seeds)


def heal(world: SyncWorld, seed: int, wait_s: float = 400.0) -> None:
    """After a fault: all engines take the next weights."""
    deadline = time.monotonic() + wait_s
    while any(state.state != "up" for state in world.states()):
        assert time.monotonic() < deadline, world.states()
        time.sleep(0.5)
    report = synced(world, seed)
    assert report.stale == {}
    for number in range(len(TENSORS)):
        assert world.difference(number, seed) <= CLOSE


def versions(world: SyncWorld, number: int) -> set[str]:
    from hybridflow.config.schema import SamplingConfig

    (completion,) = world.client(number).generate([[1, 2, 3]], SamplingConfig(), 4)
    return {span.version for span in completion.weight_versions}


# ---- what a sync brings
# --------------------------------------------------------------------------------------------------


def test_random_updates_arrive_bit_for_bit_with_the_fewest_bytes(world: SyncWorld) -> None:
    assert "proven" in world.plan_line and "no unused tensors" in world.plan_line
    minimum = [analytic_bytes(tensors) for tensors in TENSORS]
    assert world.senders.facts is not None and list(world.senders.facts.nbytes) == minimum
    for seed in (1, 2, 3):
        report = synced(world, seed)
        assert report.stale == {} and report.nbytes == sum(minimum)
        for number in range(len(TENSORS)):
            assert world.difference(number, seed) <= CLOSE, (seed, number)
            assert versions(world, number) == {str(world.version)}


def test_checksums_are_those_of_a_cold_start(world: SyncWorld) -> None:
    """Padding included. Loading the folder is what a cold start does."""
    synced(world, 4)
    for number in range(len(TENSORS)):
        client = world.client(number)
        streamed = weights_checksum(client)
        load_weights_from_disk(client, str(world.exported(4)))
        assert weights_checksum(client) == streamed


def test_what_is_checked_on_a_gpu_holds_on_a_cpu(world: SyncWorld) -> None:
    """The colocated transport of a CPU stands in for memory of the GPU; nothing is freed by sleep
    here."""
    world.configure(transport="shared_memory")
    after_sleep(world, 7)
    for number in range(len(TENSORS)):
        before, *after = through_empty_updates(world, number)
        assert after == [before, before] == [cold_start(world, number, 7)] * 2
        assert world.difference(number, 7) <= CLOSE


def test_requests_under_way_go_on_and_tell_which_weights_made_each_token(world: SyncWorld) -> None:
    synced(world, 5)
    before = world.version
    version = world.train(6)
    with generating(world.client(1, 60.0), [[5, 6, 7]] * 8, 240) as asking:
        world.sync(version)
        done = asking.result(240.0)
    assert len(done) == 8
    for completion in done:
        assert [int(span.version) for span in completion.weight_versions] == [before, world.version]
        assert completion.weight_versions[-1].end == len(completion.token_ids) == 240


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "p2p"},
        {"commit": "in_place"},
        {"transport": "shared_memory"},
        {"pause": "abort"},
        {"pause": "in_place"},
    ],
)
def test_every_way_brings_the_same(world: SyncWorld, settings: dict[str, Any]) -> None:
    world.configure(**settings)
    for seed in (7, 8):
        assert synced(world, seed).stale == {}
        # in place, prefixes of the old weights stay cached: an engine of a run with that setting
        # has no such cache
        prompts = [[seed + 100, first, 5] for first in range(4)] if "pause" in settings else PROMPTS
        for number in range(len(TENSORS)):
            assert world.difference(number, seed, prompts) <= CLOSE


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, marks=pytest.mark.full),
        pytest.param({"rank": 4, "alpha": 6.0}, marks=pytest.mark.full),
        pytest.param(
            {"rank": 4, "alpha": 6.0, "targets": ["experts.linear_fc1", "experts.linear_fc2"]},
            marks=pytest.mark.full,
        ),
    ],
)
def test_megatron_ranks_that_train_reach_the_engines_without_a_whole_tensor(
    world: SyncWorld, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """TP 2, PP 2, EP 2 with sequence parallelism; the engines were planned for other trainer ranks
    before. Adapters arrive merged: as many bytes, by the same plan.
    """
    held = world.senders
    shape = {"ranks": 4, "tensor": 2, "pipeline": 2, "expert": 2, "sequence": True, "lora": lora}
    megatron = Senders(world.hf_config, shape, "megatron")
    try:
        world.senders = megatron
        world.configure()
        for seed in (1, 2):
            assert min(megatron.command("step", seed=seed)) > 0
            world.version += 1
            report = world.sync(world.version)
            assert report.stale == {} and report.nbytes == sum(
                analytic_bytes(tensors) for tensors in TENSORS
            )
            folder = tmp_path / f"export-{seed}"
            megatron.command("export", folder=str(folder))
            for number in range(len(TENSORS)):
                assert world.difference(number, folder) <= CLOSE
    finally:
        megatron.close()
        world.senders = held
        world.configure()


# ---- refusals, before anything is touched
# ---------------------------------------------------------------------------------------------


def test_another_plan_is_refused_before_the_engine_is_paused(world: SyncWorld) -> None:
    heal(world, 10)
    world.workers[1].adopt_plan("0" * 64)
    report = synced(world, 11)
    assert (
        list(report.stale) == ["engine-1"]
        and "plan 000000000000" in report.stale["engine-1"]
        and "make a new plan" in report.stale["engine-1"]
    )
    assert world.difference(0, 11) <= CLOSE
    assert (
        world.answers(1)
        and world.difference(1, 10) <= CLOSE
        and versions(world, 1) == {str(world.version - 1)}
    )
    world.configure()
    heal(world, 12)


def test_another_version_is_refused_before_the_engine_is_paused(
    world: SyncWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    heal(world, 13)
    send = world.senders.send_weights

    def older(orders: Any, go_timeout_s: float) -> Any:
        from dataclasses import replace

        return send(
            [replace(order, version=order.version - (order.number == 1)) for order in orders],
            go_timeout_s,
        )

    monkeypatch.setattr(world.senders, "send_weights", older)
    report = synced(world, 14)
    assert list(report.stale) == ["engine-1"]
    assert (
        f"has weight version {world.version - 1}, expected {world.version}"
        in report.stale["engine-1"]
    )
    assert world.difference(0, 14) <= CLOSE and world.difference(1, 13) <= CLOSE
    monkeypatch.undo()
    heal(world, 15)


# ---- faults on the way
# --------------------------------------------------------------------------------------------------


def test_a_corrupted_bucket_leaves_that_engine_paused_and_the_other_goes_on(
    world: SyncWorld,
) -> None:
    heal(world, 20)
    world.configure()  # a new session: the fault below is in its channel
    world.senders.command("fault", ranks=[0], engine="engine-1", do="corrupt", at=2)
    report = synced(world, 21)
    assert list(report.stale) == ["engine-1"]
    why = report.stale["engine-1"]
    assert (
        "engine-1" in why
        and "engine rank" in why
        and "trainer rank 0" in why
        and "bucket" in why
        and "model.layers" in why
    )
    assert world.difference(0, 21) <= CLOSE and versions(world, 0) == {str(world.version)}
    assert not world.answers(1)
    asked = _prompts().with_columns(ticket=np.arange(4), max_new_tokens=np.full(4, 4))
    world.workers[1].ask(asked, world.configs[0].sampling, [], NO_EXTRAS)
    batch = world.workers[1].collect(60.0)
    assert set(batch["finish_reason"]) == {CUT_SHORT} and not batch.lengths("response_ids").any()
    heal(world, 22)


def test_a_retry_within_the_sync_heals_a_transfer_fault(world: SyncWorld) -> None:
    world.configure(max_retries=1)
    world.senders.command("fault", ranks=[0], engine="engine-0", do="corrupt", at=1)
    assert synced(world, 23).stale == {}
    assert world.difference(0, 23) <= CLOSE and world.difference(1, 23) <= CLOSE
    world.configure()


@pytest.mark.parametrize("commit", ["staged", pytest.param("in_place", marks=pytest.mark.full)])
def test_a_stalled_sender_stops_one_engine_at_its_deadline(world: SyncWorld, commit: str) -> None:
    heal(world, 24)
    world.configure(commit=commit)
    world.senders.command(
        "fault", ranks=[1], engine="engine-1", do="sleep", at=2, seconds=SYNC.timeout_s + 4
    )
    start = time.monotonic()
    report = synced(world, 25)
    assert time.monotonic() - start < 6 * SYNC.timeout_s
    assert list(report.stale) == ["engine-1"]
    why = report.stale["engine-1"]
    assert (
        f"{SYNC.timeout_s:g} s" in why
        and "trainer rank 1" in why
        and "engine rank" in why
        and "message" in why
    )
    assert world.difference(0, 25) <= CLOSE
    assert not world.answers(1)  # in place it holds a mixture now
    world.configure()
    heal(world, 26)


@pytest.mark.full
def test_a_sender_process_that_stops_is_an_error_and_the_next_sync_works(world: SyncWorld) -> None:
    """Both engines need this rank: none can take the weights, and the error names each engine's
    reason."""
    heal(world, 27)
    version = world.train(28)
    os.kill(world.senders.processes[1].pid, signal.SIGSTOP)
    resume = threading.Timer(
        2.5 * SYNC.timeout_s, os.kill, (world.senders.processes[1].pid, signal.SIGCONT)
    )
    resume.start()
    try:
        with pytest.raises(
            WeightSyncError, match=r"no engine received it(.|\n)*engine-0(.|\n)*engine-1"
        ) as caught:
            world.sync(version)
    finally:
        resume.join()
    assert "trainer rank 1" in str(caught.value) and f"{SYNC.timeout_s:g} s" in str(caught.value)
    assert all(is_whole(world, number, (27,)) for number in range(len(TENSORS)))
    heal(world, 29)


def test_a_receiver_killed_mid_stream_is_started_again_while_the_other_engine_goes_on(
    world: SyncWorld,
) -> None:
    heal(world, 30)
    world.configure()
    world.senders.command(
        "fault", ranks=[0], engine="engine-1", do="hold", at=2, until="receiver-killed"
    )
    version = world.train(31)
    reports = []
    syncing = threading.Thread(target=lambda: reports.append(world.sync(version)))
    syncing.start()
    world.wait_for_key("held/0")
    scheduler = world.scheduler(1)
    os.kill(scheduler, signal.SIGKILL)
    world.senders.store.set("receiver-killed", "1")
    syncing.join(240.0)
    assert list(reports[0].stale) == ["engine-1"] and world.difference(0, 31) <= CLOSE
    assert "engine-1" in reports[0].stale["engine-1"]
    assert world.states()[1].state == "starting" and world.states()[0].state == "up"
    # training goes on meanwhile
    assert synced(world, 32).stale["engine-1"].startswith("engine-1 is starting")
    assert world.difference(0, 32) <= CLOSE
    heal(world, 33)
    assert world.states()[1].restarts == 1


@pytest.mark.full
def test_an_engine_that_died_between_syncs_is_described_again_and_takes_part_later(
    world: SyncWorld,
) -> None:
    """The plan of such an engine is older than its process. Also: rows go to healthy engines alone,
    and come back in order."""
    heal(world, 40)
    restarts = world.states()[0].restarts
    server = world.workers[0].supervisor.engine
    os.kill(world.scheduler(0), signal.SIGKILL)
    _wait_dead(server)
    batch = _answered(world)
    assert len(batch) == 4 and set(world.engines.stale) == {0}
    report = synced(world, 41)
    assert list(report.stale) == ["engine-0"] and world.difference(1, 41) <= CLOSE
    heal(world, 42)
    assert world.states()[0].restarts == restarts + 1
    batch = _answered(world)
    assert set(batch.jagged("response_versions").values.tolist()) == {world.version}


@pytest.mark.full
def test_an_engine_that_hangs_while_it_generates_is_given_up(
    world: SyncWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process runs and does nothing. The other engine answers all prompts; this one
    starts again and takes the next weights."""
    heal(world, 45)
    monkeypatch.setattr(rollout, "_SETTLE_S", 1.0)
    restarts = world.states()[1].restarts
    world.workers[1].supervisor.engine.client.tokens.silence_s = 3.0
    os.kill(world.scheduler(1), signal.SIGSTOP)
    batch = _answered(world)
    assert len(batch) == 4 and set(world.engines.stale) == {1}
    assert "no data from /generate within 3 s" in world.engines.stale[1]
    heal(world, 46)
    assert world.states()[1].restarts == restarts + 1


def test_a_killed_sender_ends_the_sync_with_its_error_and_nothing_is_served(
    world: SyncWorld,
) -> None:
    """This is the last test of the module: it kills a trainer rank."""
    heal(world, 50)
    world.configure()
    for engine in ("engine-0", "engine-1"):
        world.senders.command(
            "fault", ranks=[1], engine=engine, do="hold", at=1, until="sender-killed"
        )
    version = world.train(51)
    errors = []

    def sync() -> None:
        try:
            world.sync(version)
        except WorkerError as error:
            errors.append(error)

    syncing = threading.Thread(target=sync)
    syncing.start()
    for engine in ("engine-0", "engine-1"):
        world.wait_for_key(f"held/1/{engine}")
    world.senders.processes[1].kill()
    syncing.join(240.0)
    assert len(errors) == 1 and errors[0].rank == 1
    for number in range(len(TENSORS)):
        assert not world.answers(number)
        why = world.engines.stale[number]
        # the engine's first reason: which engine rank, which trainer rank and how it is known,
        # which tensors, and the deadline
        named = r"engine-\d rank (\d): .*engine rank \1, "
        named += (
            rf"message \d+ with trainer rank 1 over {SYNC.transport}: the peer is gone: its "
            rf"process has ended "
        )
        named += rf"\(deadline {SYNC.timeout_s:g} s\).*\(bucket \d+, starting at \S*weight\S*\)"
        assert re.search(named, "".join(why.split(";")[:2])), why
        assert (
            "trainer rank 0 over p2p: the peer is gone" not in why.split("error on this rank")[0]
        ), why
    world.senders.start()
    world.configure()
    heal(world, 52)


def _prompts() -> Any:
    from hybridflow.batch import DataProto, Jagged

    return DataProto.from_columns(
        {"prompt_ids": Jagged.from_rows([np.array([1, 2, i]) for i in range(4)], np.int64)}
    )


def _answered(world: SyncWorld) -> Any:
    return block_on(world.engines.answers(world.engines.begin(_prompts(), training=True)))


def _wait_dead(server: Any, wait_s: float = 240.0) -> None:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            server.check_alive()
        except EngineError:
            return
        time.sleep(0.1)
    raise AssertionError("still alive")
