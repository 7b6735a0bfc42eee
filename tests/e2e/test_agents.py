"""Conversations with a tool through whole runs: sampled, called, masked, scored, trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

OWN = """
from openai import AsyncOpenAI

from hybridflow.agents.loops.base import agent_loop

@agent_loop("twice")
async def twice(conversation, tools):
    question = conversation.tokenizer.decode(conversation.prompt).removesuffix("=")
    [shown] = await tools.results(tools.calls("<calculator>1+2</calculator>"))
    async with conversation.serve() as served, AsyncOpenAI(base_url=served.base_url, api_key=served.api_key) as client:
        ask = client.chat.completions.create
        messages = [{"role": "user", "content": question}]
        said = (await ask(model="policy", messages=messages)).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "tool_call_id": "sum", "content": shown}]
        await ask(model="policy", messages=messages)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["messages"][-1] == {"role": "assistant", "content": solution_str}
    return sum(map(str.isdigit, solution_str)) / 10
"""


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == phase]


def test_two_steps_with_a_loop_of_ones_own(tmp_path: Path) -> None:
    """An unmodified client of OpenAI's interface holds conversations with a tool. Engine and
    trainer agree on every token of them, and observations are not trained on."""
    (tmp_path / "own.py").write_text(OWN)
    words = [
        "--config-name",
        "tiny-calculator-grpo",
        f"output_dir={tmp_path}",
        f"data.prepare.out={tmp_path / 'data'}",
    ]
    words += [
        f"rollout.agent.loop={tmp_path / 'own.py'}:twice",
        f"reward.path={tmp_path / 'own.py'}",
    ]
    words += ["trainer.total_steps=2", "sft.steps=30", "sft.batch_size=64"]  # enough to end answers
    words += ["data.train_batch_size=8", "rollout.n=4", "data.val_max_prompts=8"]
    with ForkedRun(tmp_path / "output", "train", *words) as run:
        assert run.end(300) == 0, run.out + run.err
    folder = tmp_path / "tiny-calculator-grpo"
    for record in records(folder, "train"):
        assert record["rollout/logprob_diff/max"] < 1e-4
        assert record["agent/failed/mean"] == 0 and record["agent/turns/max"] <= 2
    rows = [
        row
        for step in (1, 2)
        for row in read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
    ]
    assert any(row["turns"] == 2 for row in rows)
    for row in rows:
        assert sum(length for _, length in row["response_mask"]) == row["response_length"]
        # "3" and "=" are shown between two answers, and nothing else is
        shown = [length for sampled, length in row["response_mask"] if not sampled]
        assert shown == [2] * (row["turns"] - 1)


@pytest.mark.full
def test_a_conversation_that_fills_the_context_of_an_engine_ends_with_its_length(
    tmp_path: Path,
) -> None:
    """Each token is an answer, so that an engine gets a prompt of every length up to its last
    token. SGLang takes none that ends in the last six tokens of its KV cache; a cache without room
    for them is refused before anything starts.
    """
    (tmp_path / "own.py").write_text(
        "from hybridflow.agents.loops.base import agent_loop\n@agent_loop('fill')\n"
        "async def fill(conversation, tools):\n    while True:\n        await "
        "conversation.answer(1)\n"
    )
    prompt = 6
    most = 12
    words = [
        "--config-name",
        "e2e",
        f"output_dir={tmp_path}",
        f"data.prepare.out={tmp_path / 'data'}",
    ]
    words += [
        "cluster=one-process",
        "actor=tiny",
        "rollout=tiny",
        "sft=none",
        "trainer.total_steps=1",
        "rollout.n=2",
    ]
    words += [f"data.max_prompt_length={prompt}", f"data.max_response_length={most}"]
    words += [f"rollout.agent.loop={tmp_path / 'own.py'}:fill", f"rollout.agent.max_answers={most}"]

    def full(tokens: int) -> list[str]:
        return [
            f"rollout.max_total_tokens={tokens}",
            f"+model.hf_config.max_position_embeddings={prompt + most + 6}",
        ]

    with Run(tmp_path / "refused", "train", *words, *full(prompt + most + 5)) as run:
        assert run.end(60) == 2, run.out + run.err
        assert "whose last 6 tokens cannot contain a prompt" in run.err
    with Run(tmp_path / "output", "train", *words, *full(prompt + most + 6)) as run:
        assert run.end(300) == 0, run.out + run.err
    rows = list(read_rollouts(tmp_path / "e2e" / "rollouts" / "step_000001.parquet"))
    assert rows and all(row["turns"] == row["response_length"] == most for row in rows)
    assert {row["finish_reason"] for row in rows} == {"length"}


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_policy_learns_to_ask_the_calculator(tmp_path: Path, seed: int) -> None:
    words = [
        "--config-name",
        "tiny-calculator-grpo",
        f"output_dir={tmp_path}",
        f"data.prepare.out={tmp_path / 'data'}",
    ]
    with Run(tmp_path / "output", "train", *words, f"seed={seed}") as run:
        assert run.end(2400) == 0, run.out + run.err
    before, *_, after = records(tmp_path / "tiny-calculator-grpo", "val")
    assert after["val/score"] >= 0.9 and before["val/score"] < 0.6
    assert after["val/agent/tool_calls/mean"] >= 0.9


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_policy_learns_to_play(tmp_path: Path, seed: int) -> None:
    """Guesses at random find one number in three; four that follow what the environment says find
    all."""
    words = [
        "--config-name",
        "tiny-guess-grpo",
        f"output_dir={tmp_path}",
        f"data.prepare.out={tmp_path / 'data'}",
    ]
    with Run(tmp_path / "output", "train", *words, f"seed={seed}") as run:
        assert run.end(2400) == 0, run.out + run.err
    before, *_, after = records(tmp_path / "tiny-guess-grpo", "val")
    assert after["val/score"] >= 0.85 and before["val/score"] < 0.45
    assert after["val/agent/failed/mean"] == 0
