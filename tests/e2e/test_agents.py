"""Conversations with a tool through whole runs: sampled, called, masked, scored, trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

TOOL = '''
from hybridflow.agents.tools.base import tool

@tool("calculator")
def calculator(expression: str) -> str:
    """Multiply two numbers."""
    first, _, second = expression.partition("*")
    return str(int(first) * int(second))
'''


def records(folder: Path, phase: str) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == phase]


def test_two_steps_with_a_tool_of_ones_own(tmp_path: Path) -> None:
    """The engine and the trainer agree on every token of conversations, and observations are not trained on."""
    (tmp_path / "tool.py").write_text(TOOL)
    words = ["--config-name", "tiny-calculator-grpo", f"output_dir={tmp_path}", f"data.prepare.out={tmp_path / 'data'}"]
    words += [f"rollout.agent.tools=[{tmp_path / 'tool.py'}:calculator]", "trainer.total_steps=2", "sft.steps=60"]
    words += ["data.train_batch_size=16", "data.val_max_prompts=16", "sft.batch_size=64"]
    with Run(tmp_path / "output", "train", *words) as run:
        assert run.end(300) == 0, run.out + run.err
    folder = tmp_path / "tiny-calculator-grpo"
    for record in records(folder, "train"):
        assert record["rollout/logprob_diff/max"] < 1e-4 and record["actor/grad_norm"] > 0
        assert record["agent/failed/mean"] == 0 and record["agent/turns/max"] <= 2
    rows = [row for step in (1, 2) for row in read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")]
    for row in rows:
        shown = sum(length for sampled, length in row["response_mask"] if not sampled)
        assert sum(length for _, length in row["response_mask"]) == row["response_length"]
        assert (shown > 0) == (row["turns"] > 1)  # an observation is always answered
    assert any(row["tool_calls"] for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_policy_learns_to_ask_the_calculator(tmp_path: Path, seed: int) -> None:
    words = ["--config-name", "tiny-calculator-grpo", f"output_dir={tmp_path}", f"data.prepare.out={tmp_path / 'data'}"]
    with Run(tmp_path / "output", "train", *words, f"seed={seed}") as run:
        assert run.end(2400) == 0, run.out + run.err
    before, *_, after = records(tmp_path / "tiny-calculator-grpo", "val")
    assert after["val/score"] >= 0.9 and before["val/score"] < 0.6
    assert after["val/agent/tool_calls/mean"] >= 0.9
