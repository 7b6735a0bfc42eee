from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config.explain import Origins, explain
from hybridflow.config.load import load_config
from hybridflow.config.locate import config_dirs


def lines(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_each_number_names_the_file_or_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config-name", "tiny-moe-grpo", "--explain", "rollout.n=3"]) == 0
    out = capsys.readouterr().out
    prompts = load_config("tiny-moe-grpo").data.train_batch_size
    assert lines(out, "rollout.n ").split(maxsplit=2)[1:] == ["3", "command line"]
    assert lines(out, "rollout.num_engines").endswith("configs/rollout/tiny-two-engines.yaml")
    assert lines(out, "actor.parallel.tensor").endswith("configs/actor/tiny-tp2-pp2-ep2.yaml")
    assert lines(out, "actor.parallel.context").endswith("schema default")
    assert f"{prompts} x 3 = {prompts * 3}" in lines(out, "samples ")
    assert "2 x 2 x 1 = 4 processes" in lines(out, "one model")
    assert "4 / 4 = 1 copies" in lines(out, "data-parallel")


def test_a_file_of_a_group_may_build_on_its_neighbour() -> None:
    origins = Origins.find("tiny-moe-grpo", [], config_dirs(None))
    assert origins.of("rollout.n") == "configs/rollout/tiny.yaml"


@pytest.mark.slow
def test_a_group_chosen_on_the_command_line_is_the_one_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text("total_steps: 77\n")
    words = ["trainer=mine"]
    config = load_config("tiny-moe-grpo", words, tmp_path)
    text = explain(config, Origins.find("tiny-moe-grpo", words, config_dirs(tmp_path)))
    assert lines(text, "trainer.total_steps").split(maxsplit=2)[1:] == [
        "77",
        f"{tmp_path.name}/trainer/mine.yaml",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.kl_loss_coef=0.1", "Reference: one forward pass"),
        ("sft.steps=0", "Warm start: none"),
        ("trainer.tail_batching=0.25", "trains on the 64 that finish first"),
        ("trainer.max_staleness=2", "engines work on the samples of up to 1 + 2 steps"),
        (
            "trainer.max_staleness=2 trainer.steps_ahead=1",
            "engines work on the samples of 1 + trainer.steps_ahead 1 steps, 1024,",
        ),
        (
            "rollout.tensor=4",
            "rollout.tensor x rollout.pipeline = 4 x 1 = 4 per engine, on one node",
        ),
        ("rollout.sync.staging_bytes=4000", "4000 / (2 x 2) = 1000 bytes"),
    ],
)
def test_every_role_is_explained(override: str, said: str) -> None:
    config = load_config("tiny-moe-grpo", override.split())
    assert said in explain(
        config, Origins.find("tiny-moe-grpo", override.split(), config_dirs(None))
    )


def test_where_images_go_is_explained() -> None:
    for words, said in (([], "in this process"), (["cluster=one-process"], "sent to an engine as")):
        origins = Origins.find("tiny-vlm-grpo", words, config_dirs(None))
        text = explain(load_config("tiny-vlm-grpo", words), origins)
        assert said in lines(text, "images ")
    origins = Origins.find("tiny-moe-grpo", [], config_dirs(None))
    assert "images" not in explain(load_config("tiny-moe-grpo"), origins)


@pytest.mark.slow
def test_engines_over_several_nodes_say_where_their_ranks_lie() -> None:
    words = ["rollout.tensor=4", "rollout.expert=2", "rollout.nodes_per_engine=2"]
    text = explain(
        load_config("tiny-moe-grpo", words), Origins.find("tiny-moe-grpo", words, config_dirs(None))
    )
    assert (
        "4 x 1 = 4 per engine (expert 2), 2 on each of rollout.nodes_per_engine = 2 nodes (all on this machine"
    ) in text
    text = explain(
        load_config("tiny-moe-grpo", [*words, "cluster.address=auto"]),
        Origins.find("tiny-moe-grpo", words, config_dirs(None)),
    )
    assert text.count("2 nodes\n") == 1


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, hybridflow.config.explain; print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_epochs_are_steps_of_the_rows_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 1000)
    words = [
        "train",
        "--config-name",
        "tiny-moe-grpo",
        "--explain",
        f"data.train_files=[{tmp_path}/rows.jsonl]",
    ]
    epochs = ["trainer.total_epochs=3", "data.train_batch_size=64"]
    assert main([*words, *epochs, "trainer.total_steps=null"]) == 0
    out = capsys.readouterr().out
    assert "= 15.6 steps; trainer.total_epochs 3 = 46 steps" in lines(out, "Epoch:")
    assert main([*words, *epochs]) == 2
    assert "trainer.total_steps=60 and trainer.total_epochs=3 both set" in capsys.readouterr().err
    assert main([*words, "data.train_batch_size=1024", "actor.ppo_mini_batch_size=64"]) == 0
    assert "error: a batch has more rows than the files" in lines(capsys.readouterr().out, "Epoch:")
