"""What the README tells a newcomer to write runs as it stands there: own model, own data, own reward."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from hybridflow.data.prepare.tokenizer_files import write_byte_tokenizer
from tests.e2e.runs import Run
from tests.models import STRANGER

pytestmark = pytest.mark.slow
README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(section: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a section, in order."""
    text = README.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return [
        (language, textwrap.dedent(body))
        for language, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    ]


def write_model(folder: Path) -> None:
    """A Hugging Face folder as somebody may have it: a small Qwen2 and a tokenizer with a chat template."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**STRANGER)).save_pretrained(folder)
    write_byte_tokenizer(folder)


def test_the_readmes_own_model_data_and_reward_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, reward, recipe, commands = blocks("Your model, your data, your reward")
    assert [language for language, _ in (data, reward, recipe, commands)] == ["python", "python", "yaml", ""]
    write_model(Path("my/model"))
    exec(data[1], {})
    Path("my/reward.py").write_text(reward[1])
    Path("my/mine.yaml").write_text(recipe[1])
    for command in commands[1].splitlines():
        program, *words = command.split()
        assert program == "hybridflow"
        with Run(tmp_path / "output", *words) as run:
            assert run.end(400) == 0, run.out + run.err
            assert run.left_behind() == []
    summary = json.loads(Path("runs/mine/summary.json").read_text())
    assert summary["steps"] == 2
    assert 0 < summary["logprob_diff_max"] <= 1e-3
    assert Path("runs/mine/report.html").exists() and Path("runs/mine/export/config.json").exists()
