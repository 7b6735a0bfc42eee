"""The README's commands in the README's order, as a newcomer gives them: own model, own data, own
reward, and what is said of the run's folder."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.data.prepare.tokenizer_files import write_byte_tokenizer
from tests.e2e.runs import HYBRIDFLOW, Run
from tests.models import STRANGER
from tests.walks.package import ROOT, succeed

README = ROOT / "README.md"


def section(name: str) -> str:
    """The text of a section."""
    return README.read_text(encoding="utf-8").split(f"## {name}\n")[1].split("\n## ")[0]


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a section, in order."""
    return [
        (language, textwrap.dedent(body))
        for language, body in re.findall(
            r"^ *```(\w*)\n(.*?)^ *```$", section(name), re.DOTALL | re.MULTILINE
        )
    ]


def write_model(folder: Path) -> None:
    """A Hugging Face folder as somebody may have it: a small Qwen2 and a tokenizer with a chat
    template."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**STRANGER)).save_pretrained(folder)
    write_byte_tokenizer(folder)


def test_the_two_commands_set_up_and_start_what_is_said() -> None:
    (_, targets), (_, activate) = blocks("Two commands")
    for line, started in zip(
        targets.splitlines(), ("--config-name tiny-moe-grpo", "tests/run.py"), strict=True
    ):
        words = line.partition("#")[0].split()
        planned = subprocess.run(
            [*words, "-n"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert "requirements/setup.sh" in planned and started in planned
    assert activate == "source .venv/bin/activate\n" and HYBRIDFLOW.is_file()


@pytest.mark.slow
def test_the_readmes_own_model_data_and_reward_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("Your model, your data, your reward")
    assert [language for language, _ in found] == ["python", "python", "yaml", "", "python"]
    data, reward, recipe, commands, program = found
    write_model(Path("my/model"))
    exec(data[1], {})
    Path("my/reward.py").write_text(reward[1])
    Path("my/mine.yaml").write_text(recipe[1])
    for command in commands[1].splitlines():
        name, *words = command.split()
        assert name == "hybridflow"
        with Run(tmp_path / "output", *words) as run:
            assert run.end(400) == 0, run.out + run.err
            assert run.left_behind() == []
    Path("program.py").write_text(program[1])
    with Run(tmp_path / "output", command=(sys.executable, "program.py"), cwd=tmp_path) as run:
        assert run.end(400) == 0 and run.left_behind() == [], run.out + run.err
        assert [line for line in run.out.splitlines() if re.match(r"2 \d", line)], run.out
    folder = Path("runs/mine")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert 0 < summary["logprob_diff_max"] <= 1e-3
    for pattern in (
        "report.html",
        "metrics.jsonl",
        "**/events.out.*",
        "rollouts/*.parquet",
        "checkpoints/global_step_2",
    ):
        assert list(folder.glob(pattern)), pattern
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder / "export").config.model_type == "qwen2"
    (folder / "report.html").unlink()
    succeed([str(HYBRIDFLOW), "report", str(folder)], tmp_path)
    assert (folder / "report.html").is_file()
    for words in (
        ["checkpoint", "inspect", str(folder)],
        ["plan", "--config-dir", "my", "--config-name", "mine"],
    ):
        assert succeed([str(HYBRIDFLOW), *words], tmp_path)


def documented() -> list[tuple[str, ...]]:
    """The commands of the README's table, each alternative for itself."""
    found = []
    for cell in re.findall(r"^\| (`hybridflow .*?) \| [^|]*\|$", section("Commands"), re.MULTILINE):
        for text in re.findall(r"`hybridflow ([^`]+)`", cell):
            *words, last = text.replace("\\|", "|").split()
            found += [(*words, alternative) for alternative in last.split("|")]
    return found


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_every_command_of_the_table_has_the_options_that_are_shown(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        *itertools.takewhile(lambda word: re.fullmatch(r"[a-z-]+", word) and word[0] != "-", words)
    ]
    with pytest.raises(SystemExit) as ended:
        main([*commands, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: hybridflow {' '.join(commands)} ")
    options = [word.strip("[]") for word in words if word.strip("[]").startswith("--")]
    assert [option for option in options if option not in shown] == []


def test_the_recipes_that_are_named_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    listed = capsys.readouterr().out
    named = re.findall(
        r"`([\w-]+)`", section("Commands").partition("\nRecipes: ")[2].partition("`make help`")[0]
    )
    assert len(named) == 4 and [name for name in named if f"  {name} " not in listed] == []
