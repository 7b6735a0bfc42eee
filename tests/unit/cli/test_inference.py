"""`hybridflow eval` and `serve` with input that cannot be used: one message each, before anything is
started or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli.main import main
from tests.unit.inference.folders import model

HERE = "rollout.engine=hf"  # without a server


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "model")
    (tmp_path / "there").mkdir()
    (tmp_path / "data.parquet").write_bytes(b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere: no such folder; pass a run, a checkpoint"),
        (["there"], "there is not a model: no config.json, no checkpoint"),
        (["runs/nowhere"], "runs/nowhere: not a path, and"),
        (["runs/mine/checkpoints/latest"], "runs/mine/checkpoints/latest: no such folder; pass"),
        (["data.parquet"], "data.parquet is a file; pass a run"),
        (["model", HERE, "rollout.temperatur=1"], "unknown key rollout.temperatur"),
        (["model", HERE, "trainer.total_steps=1"], "trainer.total_steps has no effect"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "serve"])
def test_what_is_wrong_is_said_in_one_message(
    command: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main([command, *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("hybridflow: ") and said in err and out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no evaluation set was given: add --data FILE"),
        (["--data", "gone.parquet"], "data.val_files: gone.parquet does not exist; check the path"),
        (["--data", "x=there"], "data.val_sets.x.files: there is a folder"),
        (["--data", "a b=data.parquet"], "use only letters, digits, dots, dashes and underscores"),
        (
            ["--data", "data.parquet", "--k", "8"],
            "--k 8 requires that many answers per prompt, but",
        ),
        (["--data", "data.parquet", "--out", "there"], "--out there already exists"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "model", HERE, *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and out == "" and "Traceback" not in err
    assert not Path("eval").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "model", "--k", "0"], "expected a whole number of at least 1, got '0'"),
        (["eval", "model", "--samples", "3"], "unknown option --samples"),
        (["eval", "model", "--rollout.val_samples", "3"], "words without dashes: rollout.val_samp"),
        (["serve", "model", "--port", "65536"], "expected a number from 0 to 65535"),
        (["serve"], "the following arguments are required: MODEL"),
    ],
)
def test_a_wrong_option_is_explained(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_help_has_an_example_that_is_parsed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert f"hybridflow {command} runs/tiny-moe-grpo" in out
    assert max(map(len, out.splitlines())) <= 100
