"""Receiver and senders over a real store and real channels, in one process; the engine is a small
module with a loader of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridflow.engines.sglang import weight_receiver
from hybridflow.sync import session
from hybridflow.sync.session import ABORT, DESCRIBE, Control
from tests.unit.engines.bench import FAMILY, HOST, PAD, WAIT_S, Bench, Engine


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(weight_receiver, "_rank_in_engine", lambda: 0)  # SGLang is not running here
    built = Bench()
    yield built
    for sender in built.senders:
        sender.close()


@pytest.mark.parametrize("staged", [True, False])
def test_new_weights_arrive_again_and_again_and_padding_is_cleared(
    bench: Bench, staged: bool
) -> None:
    padded = bench.engine.get_parameter("model_embed_tokens_weight")
    for seed in (1, 2):
        whole = bench.train(seed)
        report, outcomes, _ = bench.sync(staged=staged)
        assert report.error == "" and report.nbytes == sum(t.nbytes for t in whole.values()) == sum(
            o.nbytes for o in outcomes
        )
        assert {o.status for o in outcomes} == {"served"}
        assert bench.holds(whole) and bool((padded[-PAD:] == 0).all())
    assert bench.engine.post_loads == 2


def test_a_stage_of_a_pipeline_receives_behind_the_back_of_its_scheduler(bench: Bench) -> None:
    """The loader returns while nobody has sent anything yet; inference tensors, which may be
    written in inference mode alone, included."""
    with torch.inference_mode():
        for parameter in bench.engine.parameters():
            parameter.data = parameter.data.clone()
        for seed in (1, 2):
            whole = bench.train(seed)
            report, outcomes, _ = bench.sync(in_background=True)
            assert (
                report.error == ""
                and {o.status for o in outcomes} == {"served"}
                and bench.holds(whole)
            )


def test_describing_leaves_the_live_weights_alone(bench: Bench) -> None:
    assert all(bool((parameter == 7.0).all()) for parameter in bench.engine.parameters())
    assert bench.facts.padding == PAD * FAMILY.tensors()["model.embed_tokens.weight"][1]


def test_weights_that_moved_are_found_again(bench: Bench) -> None:
    bench.train(1)
    bench.sync()
    for parameter in bench.engine.parameters():
        parameter.data = parameter.data.clone()
    whole = bench.train(2)
    assert bench.sync()[0].error == "" and bench.holds(whole)


def test_another_layout_than_the_plans_is_refused_and_a_later_session_works(bench: Bench) -> None:
    whole = bench.train(1)
    bench.sync()
    small = bench.engine.get_parameter("model_embed_tokens_weight").data
    bench.engine.model_embed_tokens_weight.data = torch.full((len(small) + 3, small.shape[1]), 9.0)
    bench.train(2)
    report, outcomes, board = bench.sync()
    assert "rank 0: the weight layout has changed" in report.error and board.decision() == ABORT
    assert all("engine-0" in o.error and "trainer rank" in o.error for o in outcomes)
    bench.engine.model_embed_tokens_weight.data = small
    assert bench.holds(whole)
    whole = bench.train(3)
    assert bench.sync("s1")[0].error == "" and bench.holds(whole)


def test_what_was_called_off_is_not_copied(bench: Bench) -> None:
    whole = bench.train(1)
    bench.sync()
    bench.train(2)
    report, _, _ = bench.sync("s1", call_off="the driver has given up")
    assert report.error != "" and bench.holds(whole)


def test_nothing_that_goes_wrong_leaves_the_loader(bench: Bench) -> None:
    weight_receiver.load(bench.engine, [("no json", torch.zeros(1))])
    weight_receiver.load(bench.engine, [])
    unreachable = Control(DESCRIBE, HOST, 1, 0.2, "described", 0, 1)
    weight_receiver.load(bench.engine, [(unreachable.to_json(), torch.zeros(1))])


def test_a_loader_that_cannot_be_traced_is_reported(bench: Bench) -> None:
    class Odd(Engine):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.get_parameter(name.replace(".", "_")).data.copy_(tensor.sum())

    receiver = weight_receiver.receiver_of(Odd())
    receiver.handle(Control(DESCRIBE, HOST, bench.store.port, WAIT_S, "odd", 0, 1))
    report = session.read_reports(bench.store, "odd", [0], WAIT_S)[0]
    assert (
        report.error.startswith("rank 0: ") and "a source that is not an HF tensor" in report.error
    )
