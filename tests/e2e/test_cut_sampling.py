"""Whole runs that sample with top-p and top-k: the trainer's log-probs are those that the tokens
were sampled with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.batch import read_parquet
from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.full]
CUT = (
    "rollout.sampling.top_p=0.8",
    "rollout.sampling.top_k=12",
    "rollout.sampling.temperature=0.9",
)
TENSOR = (
    "cluster.procs_per_node=2",
    "actor.parallel.tensor=2",
    "actor.parallel.pipeline=1",
    "actor.parallel.expert=1",
)
FSDP = (
    "model=tiny-dense",
    "~model.hf_config.moe_intermediate_size",
    "actor=tiny",
    "actor.backend=fsdp",
    "actor.ppo_mini_batch_size=2",
    "cluster.procs_per_node=2",
)


@pytest.mark.parametrize("layout", [TENSOR, FSDP], ids=["tensor", "fsdp"])
def test_log_probs_are_over_the_supports_of_real_engines(
    tmp_path: Path, settings: list[str], layout: tuple[str, ...]
) -> None:
    """Within the bound of a run without cuts, 1e-4; the reference equals the policy of the first
    step. A validation set ends its answers behind a text, and has a penalty and a length of its
    own."""
    sampling = "{stop: ['1'], temperature: 0.8, repetition_penalty: 1.2, max_new_tokens: 3}"
    files = next(word for word in settings if word.startswith("data.prepare.out=")).partition("=")[
        2
    ]
    words = [
        *settings,
        f"output_dir={tmp_path}",
        *layout,
        *CUT,
        "rollout.num_engines=1",
        "actor.kl_loss_coef=1e-3",
        "rollout.logprob_diff_bound=1e-4",
        (
            f"data.val_sets={{ends: {{files: [{files}/test.parquet], max_prompts: 64, sampling: "
            f"{sampling}}}}}"
        ),
    ]
    with Run(tmp_path / "output", "train", *words) as run:
        exit_code = run.end(400)
        left = run.left_behind()
    assert exit_code == 0, run.out + run.err
    assert left == [] and "over each token's sampling candidates" in run.out
    folder = tmp_path / "e2e"
    assert 0 < json.loads((folder / "summary.json").read_text())["logprob_diff_max"] <= 1e-4
    first = next(one for one in read_jsonl(folder / "metrics.jsonl") if one["phase"] == "train")
    assert abs(first["actor/ref_kl"]) <= 1e-6 and abs(first["actor/first_ppo_kl"]) <= 1e-6
    sizes = read_parquet(folder / "rollouts" / "step_000001.parquet").jagged("support_sizes").values
    assert 1 <= sizes.min() < sizes.max() <= 12
    answers = read_parquet(folder / "validation-ends" / "step_000000.parquet")
    texts = answers["response_text"].tolist()
    reasons = answers["finish_reason"].tolist()
    assert answers.lengths("response_ids").max() <= 3
    ended = [text for text in texts if "1" in text]
    assert ended and all(text.index("1") == len(text) - 1 for text in ended)
    assert all(reason == "stop" for text, reason in zip(texts, reasons, strict=True) if "1" in text)
