"""A whole run with R3 router replay and everything offloaded: the routers go along, the numbers are
those of a run without either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
PHASES = (
    "compute_log_probs_along_routes",
    "compute_ref_log_probs",
    "update_policy",
    "send_weights",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("replay")
    # one rank and one engine: replay in every layout is `tests/dist/test_router_replay.py`'s
    words = [
        *("actor=tiny", "cluster=one-process", "rollout=tiny"),
        "actor.router_replay=r3",
        "actor.offload={weights: true, gradients: true, optimizer: true}",
        "rollout.sleep_while_training=true",
    ]
    words += [
        "actor.ppo_mini_batch_size=2",
        "actor.kl_loss_coef=0.01",
        "trainer.save_every_steps=1",
        f"output_dir={out}",
    ]
    with Run(out / "output", "train", *settings, *words) as run:
        assert run.end(500) == 0, run.out + run.err
        yield out / "e2e"


def records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == "train"]


def test_every_token_is_replayed_in_every_layer_and_pass(folder: Path) -> None:
    # of the e2e model; the old-log-prob pass and one epoch of updates
    layers = 2
    passes = 2
    for record in records(folder):
        rows = read_rollouts(folder / "rollouts" / f"step_{record['step']:06d}.parquet")
        tokens = sum(row["prompt_length"] + row["response_length"] - 1 for row in rows)
        assert record["actor/router_replay/tokens"] == tokens * layers * passes > 0
        assert record["actor/router_replay/mismatches"] == 0
        # fp32 and the same weights on both sides
        assert record["actor/router_replay/differing"] <= 2e-3
        # the second update's weights are no longer those of the samples
        assert 0 <= record["actor/router_replay/drifted"] < 0.5


def test_training_is_as_without(folder: Path) -> None:
    steps = records(folder)
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["actor/grad_norm"] > 1e-3
        # the weights that sleep and wake are those that the engines got
        assert 0 < record["rollout/logprob_diff/mean"] <= 1e-4
        assert abs(record["actor/first_ppo_kl"]) <= 1e-6
    assert steps[0]["actor/ref_kl"] == 0 and steps[1]["actor/ref_kl"] != 0
    assert (folder / "checkpoints" / "global_step_2").is_dir() and (
        folder / "export" / "config.json"
    ).exists()


def test_peaks_of_memory_are_logged_for_every_phase(folder: Path) -> None:
    for record in records(folder):
        peaks = [record[f"perf/max_memory_allocated_gb/{phase}"] for phase in PHASES[:3]]
        assert all(0.1 < peak < 10 for peak in peaks)
        assert record["perf/max_memory_allocated_gb"] >= max(peaks)


def test_the_report_shows_the_routes(folder: Path) -> None:
    report = (folder / "report.html").read_text()
    assert "Router choices that differ (replayed)" in report
    assert "Router choices that differ from the engines" in report and "replayed (r3)" in report
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
