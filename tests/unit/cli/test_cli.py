"""The command line: instant help, one message an error, exit codes, and what reaches the rooms
behind it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import build_parser, main
from hybridflow.config.load import load_config
from hybridflow.errors import HybridFlowError, RunInterrupted
from hybridflow.launch import __main__ as launch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replaces the rooms that the command line starts; records what reached them."""
    record: list[tuple[Any, ...]] = []

    def stand_in(module: str, **functions: Any) -> None:
        fake = types.ModuleType(module)
        for name, function in functions.items():
            setattr(fake, name, function)
        parent, _, child = module.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), child, fake, raising=False)
        monkeypatch.setitem(sys.modules, module, fake)

    stand_in(
        "hybridflow.trainer.app",
        train=lambda config, preload: record.append(("train", config)),
        sft=lambda config, preload: record.append(("sft", config)),
    )
    stand_in(
        "hybridflow.trainer.preload", Preload=lambda config, with_engines: contextlib.nullcontext()
    )

    def prepare(
        task: str, out: Path, source: Path | None, options: dict[str, Any]
    ) -> types.SimpleNamespace:
        record.append((task, out, source, options))
        return types.SimpleNamespace(rows={"train.parquet": 3}, reused=False, folder=out)

    monkeypatch.setattr("hybridflow.data.prepare.prepare", prepare)
    stand_in("hybridflow.observe.report", write_report=lambda run_dir: run_dir / "report.html")
    return record


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["sft", "--help"],
        ["prepare", "--help"],
        ["version"],
        ["train"],
    ],
)
def test_help_answers_at_once(words: list[str]) -> None:
    """It loads nothing but the standard library and our own modules, which takes a tenth of a
    second."""

    def loads(*command: str) -> tuple[str, set[str]]:
        whole = [sys.executable, "-X", "importtime", *command]
        result = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=True)
        lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
        return result.stdout, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}

    said, loaded = loads("-m", "hybridflow.cli.main", *words)
    assert "hybridflow" in said and "hybridflow" in loaded
    # copy looks for Jython's
    assert loaded - loads("-c", "")[1] <= sys.stdlib_module_names | {"hybridflow", "org"}


@pytest.mark.slow
def test_an_error_is_one_message_without_a_traceback() -> None:
    command = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "train",
        "--config-name",
        "e2e",
        "actor.optim.lrr=1",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "hybridflow: unknown key actor.optim.lrr; did you mean actor.optim.lr?"
    )
    assert "Traceback" not in result.stderr


def test_a_traceback_comes_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_TRACEBACK", "1")
    with pytest.raises(HybridFlowError):
        main(["train", "--config-name", "nope"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HybridFlowError("it broke"), 1),
        (RunInterrupted("resume with ..."), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(config: object, preload: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["hybridflow.trainer.app"], "train", fail)
    assert main(["train", "--config-name", "e2e"]) == code
    assert (str(error) or "interrupted") in capsys.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, preload: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["hybridflow.trainer.app"], "train", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--config-name", "e2e"])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["train", "sft"])
def test_a_job_gets_the_checked_configuration(job: str, calls: list[Any]) -> None:
    words = [
        "sft=warm-start",
        "--config-name",
        "e2e",
        "actor.optim.lr=5e-4",
        "--config-dir",
        ".",
        "trainer.total_steps=3",
    ]
    assert main([job, *words, "data.prepare.options.num_sft=64"]) == 0
    [(called, config)] = calls
    assert called == job
    assert (config.actor.optim.lr, config.trainer.total_steps, config.sft.batch_size) == (
        5e-4,
        3,
        128,
    )


def test_a_job_that_cannot_run_does_not_start(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config-name", "e2e", "data.train_files=[nowhere.parquet]"]) == 2
    assert "nowhere.parquet" in capsys.readouterr().err
    assert calls == []


def test_train_alone_lists_the_recipes(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("# My own one.\nname: mine\n")
    assert main(["train", "--config-dir", "."]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("tiny-moe-grpo", "gsm8k-smoke", "e2e"))
    assert re.search(r"^  mine +My own one\.$", out, re.M)
    assert calls == []


def test_overrides_without_a_recipe_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "trainer.total_steps=3"]) == 2
    assert "--config-name" in capsys.readouterr().err


@pytest.mark.slow
def test_print_config_prints_the_resolved_yaml_and_starts_nothing(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config-name", "e2e", "--print-config", "rollout.n=9"]) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert load_config("printed", (), Path()).rollout.n == 9
    assert calls == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--confg-name", "e2e"],
        ["train", "--config-name", "e2e", "-x"],
        ["report", "a", "b"],
        ["nope"],
    ],
)
def test_unknown_options_are_refused(
    words: list[str], calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert (
        next(word for word in words if word in {"--confg-name", "-x", "b", "nope"})
        in capsys.readouterr().err
    )
    assert calls == []


def _parsers(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The words that lead to each parser, and one of its options cut short."""
    for action in parser._actions:
        for option in action.option_strings:
            if (
                len(option) > 4
                and option.startswith("--")
                and option[:-1] not in parser._option_string_actions
            ):
                yield (*path, option[:-1])
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from _parsers(command, (*path, name))


@pytest.mark.slow
def test_an_option_cut_short_is_refused_with_its_whole_name_in_every_command() -> None:
    """What an abbreviation means would change with the next option."""
    cut = list(_parsers(build_parser()))
    assert len(cut) > 60 and {len(words) for words in cut} >= {1, 2, 3}
    for words in cut:
        assert not _takes(build_parser(), words), words
    assert all(not _takes(launch._parser(), words) for words in _parsers(launch._parser()))


def _takes(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Whether the parser knows the option at the end of the words, whatever it then misses."""
    for word in words[:-1]:
        [parser] = [
            one.choices[word]
            for one in parser._actions
            if isinstance(one, argparse._SubParsersAction)
        ]
    return parser._parse_optional(words[-1])[0] is not None  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "--config", "e2e"], "did you mean --config-dir or --config-name?"),
        (["slurm", "submit", "--node=3"], "did you mean --nodes?"),
        (["train", "--expl"], "did you mean --explain?"),
        (["train", "--steps", "3"], "unknown option --steps; settings are words without dashes"),
        (["watch", "run", "--host", "0.0.0.0"], "unknown option --host\n"),
        (["watch", "run", "other"], "unexpected argument other\n"),
        (["trian"], "unknown command trian; did you mean train?"),
        (["query"], "unknown command query (choose from train, sft,"),
        (["eval"], "the following arguments are required: MODEL\n"),
    ],
)
def test_the_whole_name_of_an_option_is_told(
    words: list[str], hint: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert hint in capsys.readouterr().err and calls == []


def test_prepare_passes_typed_options(calls: list[Any]) -> None:
    words = ["arithmetic", "num_train=4000", "--out", "there", "zero_pad=true", "operation=mul"]
    assert main(["prepare", *words]) == 0
    assert calls == [
        (
            "arithmetic",
            Path("there"),
            None,
            {"num_train": 4000, "zero_pad": True, "operation": "mul"},
        )
    ]


def test_prepare_writes_beside_the_other_data_by_default(calls: list[Any], tmp_path: Path) -> None:
    assert main(["prepare", "gsm8k", "--source", str(tmp_path)]) == 0
    assert calls == [("gsm8k", Path("data/gsm8k"), tmp_path, {})]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["gms8k"], ("did you mean gsm8k?", "arithmetic")),
        (["gsm8k", "--source", "nowhere"], ("--source nowhere",)),
        (["arithmetic", "num_train"], ("'num_train'", "key=value")),
    ],
)
def test_prepare_refuses_what_it_cannot_do(
    words: list[str], parts: tuple[str, ...], calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *words]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts)
    assert calls == []


def test_help_says_what_each_task_makes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    text = capsys.readouterr().out
    assert "arithmetic  " in text and "Integer arithmetic written as characters" in text
    assert "gsm8k  " in text and "GSM8K (openai/gsm8k): grade-school word problems" in text


def test_report_prints_where_it_is(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main(["report", "nowhere"]) == 2


def test_report_of_a_folder_that_is_no_run(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "kimi-k2", "--trainer", "tp=8", "--engines", "tp=8"],
            "ranks=NUMBER is missing",
        ),
        (
            ["--model", "kimi-k2", "--trainer", "ranks=8,tp=x", "--engines", "tp=8"],
            "expected NAME=NUMBER",
        ),
        (["--model", "kimi-k3", "--trainer", "ranks=8", "--engines", "tp=8"], "kimi-k3"),
    ],
)
def test_wrong_sizes_of_a_plan_exit_as_other_user_errors(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", "plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_that_cannot_be_written_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        "llama-3.1-70b",
        "--trainer",
        "ranks=8,tp=8",
        "--engines",
        "tp=8",
        "--write",
        str(tmp_path),
    ]
    assert main(["reshard", "plan", *words]) == 1
    assert (
        capsys.readouterr().err
        == f"hybridflow: {tmp_path}: Is a directory; it is a folder; choose another name\n"
    )
    assert main(["reshard", "plan", *words[:-1], "/dev/full"]) == 1
    assert capsys.readouterr().err.startswith(
        "hybridflow: /dev/full: No space left on device; free space"
    )


def test_prepare_without_its_source_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "gsm8k", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "--source" in error and "`hf download --repo-type dataset openai/gsm8k`" in error


def test_config_keys_explains_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "keys", "actor.router_replay"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith('actor.router_replay = "none"  (none | compare | r2 | r3)')
        and "r2: from the" in out
    )
    assert main(["config", "keys", "actor.nothing"]) == 2
    assert "unknown key actor.nothing" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_package_that_was_built_without_its_kernels_says_what_to_build(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: None,
) -> None:
    monkeypatch.setitem(sys.modules, "hybridflow_kernels", None)
    assert main([command, "--config-name", "e2e"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "hybridflow_kernels is not installed" in said
        and "launch/containers/Dockerfile" in said
    )
