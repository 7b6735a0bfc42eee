"""The settings of an evaluation: the run's, without training; what is refused, and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hybridflow.config.load import dump_yaml, load_config
from hybridflow.config.schema import RunConfig
from hybridflow.config.val_sets import val_sets
from hybridflow.errors import ConfigError
from hybridflow.inference.evaluation import check_ks
from hybridflow.inference.settings import Job, settings
from hybridflow.inference.source import Source, find
from tests.unit.inference.folders import model

EVAL = Job("eval")


def run_of(folder: Path, *words: str) -> Source:
    """The export of a run whose working directory was `folder`."""
    (folder / "data").mkdir(parents=True)
    for name in ("test", "train", "sft"):
        (folder / "data" / f"{name}.parquet").write_bytes(b"")
    (folder / "data" / "tokenizer").mkdir()
    (folder / "reward.py").write_text("def compute_score(*_): return 0.0")
    config = load_config("e2e", ["data.prepare.out=data", "name=mine", *words])
    export = model(folder / "runs" / "mine" / "export", dtype="float32")
    (folder / "runs" / "mine" / "config.yaml").write_text(dump_yaml(config))
    return find(str(export))


@pytest.mark.slow
def test_a_run_evaluates_what_it_validated_from_any_folder(tmp_path: Path) -> None:
    source = run_of(tmp_path, "rollout.val_sampling.temperature=0.5", "rollout.val_samples=3")
    config = settings(source, [], EVAL, out=tmp_path / "out")
    given = val_sets(config)[""]
    assert given.files == (str(tmp_path / "data" / "test.parquet"),)
    assert (given.samples, given.sampling.temperature, given.max_prompts) == (3, 0.5, 8)
    assert config.model.tokenizer == str(tmp_path / "data" / "tokenizer")
    assert (config.rollout.num_engines, config.rollout.engine) == (2, "sglang")
    assert config.data.train_files == () and config.sft == RunConfig().sft
    assert (config.name, config.output_dir) == ("out", str(tmp_path))


@pytest.mark.slow
def test_a_moved_run_is_told_that_its_data_are_missing(tmp_path: Path) -> None:
    run_of(tmp_path / "before")
    (tmp_path / "before" / "runs" / "mine").rename(tmp_path / "after")
    source = find(str(tmp_path / "after" / "export"))
    config = settings(source, [f"data.val_files=[{__file__}]"], EVAL)
    assert config.data.val_files == (__file__,)
    with pytest.raises(ConfigError, match=r"data/gone.parquet does not exist"):
        settings(source, ["data.val_files=[data/gone.parquet]", "data.prepare.task=null"], EVAL)


@pytest.mark.slow
def test_given_sets_replace_those_of_the_run(tmp_path: Path) -> None:
    source = run_of(tmp_path, "data.val_sets.old.files=[data/test.parquet]")
    one, two = tmp_path / "one.parquet", tmp_path / "a=b.parquet"
    for file in (one, two):
        file.write_bytes(b"")
    words = ["data.val_sets.math.samples=4", "data.val_sets.math.sampling.temperature=1"]
    config = settings(source, words, EVAL, [f"math={one}", f"math={two}", str(two)])
    sets = val_sets(config)
    assert sets.keys() == {"", "math"} and sets[""].files == (str(two),)
    assert sets["math"].files == (str(one), str(two))
    # the run's limit of its own validation is not one of other data
    assert (sets["math"].samples, sets[""].samples, sets["math"].max_prompts) == (4, 1, None)
    with pytest.raises(ConfigError, match=r"--data has no set named maths \(named sets: math\)"):
        settings(source, ["data.val_sets.maths.samples=4"], EVAL, [f"math={one}"])


@pytest.mark.slow
def test_a_model_without_a_run_has_defaults(tmp_path: Path) -> None:
    source = find(str(model(tmp_path / "model", dtype="float32")))
    file = tmp_path / "test.parquet"
    file.write_bytes(b"")
    config = settings(source, [], EVAL, [str(file)])
    assert (config.model.path, config.model.dtype) == (str(tmp_path / "model"), "float32")
    assert not config.cluster.in_process
    here = settings(source, ["rollout.engine=hf"], EVAL, [str(file)])
    assert here.cluster.in_process and here.rollout.num_engines == 1
    with pytest.raises(ConfigError, match="no evaluation set was given: add --data FILE"):
        settings(source, [], EVAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout.temprature=1"], "unknown key rollout.temprature"),
        (["actor.optim.lr=1"], "actor.optim.lr has no effect on hybridflow eval, which does not"),
        (["algorithm=dr-grpo"], "algorithm has no effect on hybridflow eval"),
        (
            ["model.path=x"],
            "model.path=x: pass the folder as an argument instead: hybridflow eval FOLDER",
        ),
        (["model.tokenizer=gone"], "model.tokenizer=gone: folder not found"),
        (
            ["rollout.val_samples=2"],
            "rollout.val_samples=2 with rollout.val_sampling.temperature=0",
        ),
        (["rollout.quantization=fp8"], "rollout.quantization=fp8: the trainer quantized"),
        (["rollout.nodes_per_engine=2"], "engines are started on this machine only"),
        (["data.max_response_length=0"], "data.max_response_length=0 must be"),
        (["data.max_response_length=99999"], "rollout.max_total_tokens=16384 is less than"),
        (["rollout"], "write key=value"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_named(
    tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(run_of(tmp_path), words, EVAL)
    assert said in str(refused.value)


@pytest.mark.slow
def test_code_that_a_run_names_runs_only_if_it_is_allowed(tmp_path: Path) -> None:
    source = run_of(tmp_path, "reward=custom", "reward.path=reward.py")
    with pytest.raises(
        ConfigError, match=r"hybridflow eval would run code .*reward.py.*--run-code"
    ):
        settings(source, [], EVAL)
    assert settings(source, [], Job("eval", run_code=True)).reward.path == str(
        tmp_path / "reward.py"
    )
    assert settings(source, [f"reward.path={tmp_path / 'reward.py'}"], EVAL)
    # a server has no reward
    assert settings(source, [], Job("serve")).reward.path is None


@pytest.mark.slow
def test_a_further_policy_has_its_own_settings(tmp_path: Path) -> None:
    source = run_of(tmp_path, "roles={tester: {rollout: {num_engines: 1}}}")
    other = find(str(model(source.folder.parent / "export-tester")))
    assert settings(other, [], EVAL).rollout.num_engines == 1
    stranger = dataclasses.replace(source, role="export")
    assert settings(stranger, [], EVAL).rollout.num_engines == 2


@pytest.mark.slow
def test_k_is_at_most_the_number_of_answers(tmp_path: Path) -> None:
    words = ["rollout.val_samples=4", "rollout.val_sampling.temperature=1"]
    config = settings(run_of(tmp_path), words, EVAL)
    check_ks(config, [1, 4])
    with pytest.raises(
        ConfigError, match=r"--k 8 requires .* rollout.val_samples=4; set rollout.val"
    ):
        check_ks(config, [1, 8])
