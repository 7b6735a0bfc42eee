"""The speed of a step in verl's units, and what it is on devices whose peak is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config import derived
from hybridflow.config.load import load_config
from hybridflow.trainer.metrics import answer_metrics
from hybridflow.trainer.performance import Performance

SECONDS = {"timing_s/step": 4.0, "timing_s/gen": 1.0, "timing_s/update_actor": 2.0}


def batch_of(lengths: list[tuple[int, int]]) -> DataProto:
    prompts, responses = (
        Jagged.from_rows([np.zeros(length) for length in side], np.int64)
        for side in zip(*lengths, strict=True)
    )
    return DataProto.from_columns({"prompt_ids": prompts, "response_ids": responses})


@pytest.mark.slow
def test_throughput_is_that_of_one_device() -> None:
    config = load_config("grpo-qwen3-8b-1x8", ["cluster.nodes=2"])
    found = Performance(config).metrics(batch_of([(100, 60), (20, 20)]), SECONDS)
    assert found == {
        "perf/time_per_step": 4.0,
        "perf/throughput": 200 / 4.0 / 16,
        "timing_per_token_ms/gen": 1000 / 80,
        "timing_per_token_ms/update_actor": 2000 / 200,
    }


def test_mfu_of_a_known_device() -> None:
    config = load_config("grpo-qwen3-8b-1x8", [])
    speed = Performance(config)
    hf = derived.hf_config(config.model)
    assert (hf["hidden_size"], hf["num_hidden_layers"], hf["intermediate_size"]) == (
        4096,
        36,
        12288,
    )
    speed.use_model(hf, "NVIDIA H100 80GB HBM3")
    rows = [(1000, 7000)] * 64
    found = speed.metrics(batch_of(rows), SECONDS)
    # by hand: 6 operations per weight and token without the embedding, and 12 x layers x
    # hidden x length / 2 for causal attention
    weights = 36 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 12288) + 151936 * 4096
    operations = 64 * 8000 * (6 * weights + 6 * 36 * 4096 * 8000)
    actor = operations * config.actor.ppo_epochs / (2.0 * 8 * 989e12)
    assert found["perf/mfu/actor"] == pytest.approx(actor, rel=0.01)
    assert found["perf/mfu"] == pytest.approx(actor / 2, rel=0.01)  # half of the step


@pytest.mark.parametrize("name", ["", "NVIDIA GeForce RTX 4090", "NVIDIA GH100X"])
def test_no_mfu_where_the_peak_is_not_known(name: str) -> None:
    config = load_config("grpo-qwen3-8b-1x8", [])
    speed = Performance(config)
    speed.use_model(derived.hf_config(config.model), name)
    assert not [key for key in speed.metrics(batch_of([(5, 5)]), SECONDS) if "mfu" in key]


def answered(scores: list[float], uids: list[int], sources: list[str]) -> dict[str, float]:
    batch = batch_of([(3, 2)] * len(scores))
    columns = {
        "scores": np.array(scores, np.float32),
        "uid": np.array(uids),
        "data_source": np.array(sources, object),
        "finish_reason": np.array(["stop"] * len(scores), object),
    }
    return answer_metrics(batch.with_columns(**columns))


def test_pass_at_k_and_scores_by_source() -> None:
    # two prompts with four samples each, of which one and none are right, in any order of rows
    scores = [0, 0, 1, 0, 0, 0, 0, 0]
    found = answered(list(map(float, scores)), [5, 7, 5, 7, 5, 7, 5, 7], ["a/b", "c"] * 4)
    assert found["critic/pass@4"] == 0.5 and found["critic/pass@2"] == 0.25
    assert found["critic/score_of/a/b/mean"] == 0.25 and found["critic/score_of/c/mean"] == 0
    assert "critic/pass@1" not in found


def test_what_is_left_out_of_pass_at_k() -> None:
    assert not _passes(answered([0.5, 1.0], [1, 1], ["a", "a"]))  # not right or wrong
    assert not _passes(answered([0.0, 1.0, 1.0], [1, 1, 2], ["a"] * 3))  # groups of two sizes
    found = answered([0.0, 1.0], [1, 2], ["a", "a"])
    assert not _passes(found) and not [name for name in found if "score_of" in name]


def _passes(found: dict[str, float]) -> list[str]:
    return [name for name in found if "pass@" in name]


def test_a_cluster_of_processes_counts_processes() -> None:
    config = load_config("tiny-moe-grpo", [])
    cluster = replace(config.cluster, procs_per_node=3, devices_per_node=None)
    assert Performance(replace(config, cluster=cluster)).devices == 3
