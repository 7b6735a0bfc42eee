"""What an update waits for besides its passes: data-parallel ranks, and how a weight sync
travels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.config.load import load_config
from hybridflow.models.published import published
from hybridflow.planning.devices import DEVICES, read_cluster
from hybridflow.planning.job import Job, job_of
from hybridflow.planning.plan import sync_seconds
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Cut, Practice, Training

LENGTH = 2048.0
MICRO = 4096.0


def training(cut: Cut, practice: Practice = Practice(), network_gbs: float = 50.0) -> Training:  # noqa: B008
    device = replace(DEVICES["H100"], network_gbs=network_gbs)
    return Training(decoder_of(published("qwen3-8b")), cut, device, practice=practice)


def waits(cut: Cut, practice: Practice = Practice(), network_gbs: float = 50.0) -> float:  # noqa: B008
    found = training(cut, practice, network_gbs)
    # without the passes and the optimizer's own memory traffic
    stepped = 2 * found.optimizer(0) / (found.device.memory_gbs * 1e9 * found.constants.memory)
    return found.update_seconds(MICRO, 4, LENGTH) - found.pass_seconds(MICRO, 4, LENGTH) - stepped


def test_ranks_wait_for_gradients_and_weights_that_nothing_hides() -> None:
    cut = Cut(64, 8, sequence=True)
    one = training(cut)
    sent = one.numbers[0].total * (4 + 2) * 7 / 8 / (50e9 * one.constants.network)
    assert waits(cut) == pytest.approx(sent)
    # no other rank has the same weights
    assert waits(Cut(8, 8, sequence=True)) == pytest.approx(0, abs=1e-9)


def test_overlap_hides_no_more_than_a_micro_batch_lasts() -> None:
    cut = Cut(64, 8, sequence=True)
    both = Practice(overlaps_gradients=True, overlaps_weights=True)
    whole = waits(cut)
    gradients = waits(cut, Practice(overlaps_gradients=True))
    assert waits(cut, both) < gradients < whole
    slow = 0.5  # a network so slow that computation is short beside it
    hidden = waits(cut, network_gbs=slow) - waits(cut, both, slow)
    assert hidden == pytest.approx(sum(training(cut, both, slow).stage_seconds(0, MICRO, LENGTH)))


def test_a_ring_leaves_a_node_through_the_network_devices_of_all_its_ranks_there() -> None:
    one = training(Cut(64))
    network = 50e9 * one.constants.network
    assert one.link(8, 8) == one.link(2, 8) == pytest.approx(network)
    assert one.link(16, 4) == pytest.approx(2 * network)
    assert one.link(8, 1) == one.link(2, 4) == pytest.approx(450e9 * one.constants.domain)
    assert one.link(64, 1) == pytest.approx(min(8 * network, one.link(8)))


@pytest.mark.parametrize(
    ("change", "attribute", "value"),
    [
        ("actor.parallel.overlap_grad_reduce=true", "overlaps_gradients", True),
        ("actor.parallel.moe_dispatcher=deepep", "dispatch", "deepep"),
    ],
)
def test_the_plan_of_a_run_reads_how_it_communicates(
    change: str, attribute: str, value: object
) -> None:
    practice = planned(change).actor.training.practice
    assert (
        getattr(practice, attribute)
        == value
        != getattr(planned().actor.training.practice, attribute)
    )


def test_a_sync_from_rank_to_rank_is_faster_than_one_that_everybody_receives() -> None:
    device = DEVICES["H100"]
    assert sync_seconds(214e9, device, True) < sync_seconds(214e9, device, False)
    assert planned("rollout.sync.transport=p2p").sends_slices and not planned().sends_slices
    assert planned("rollout.pool=null").sends_slices  # `auto`, with devices of their own


def planned(*change: str) -> Job:
    config = load_config("grpo-qwen3-30b-a3b-4x8", list(change))
    return job_of(config, read_cluster(None, 4, 8))
