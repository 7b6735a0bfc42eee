"""Every recipe for a cluster, from an empty folder with a model folder and prompts: its sbatch
file, its explanation and its plan."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.cli.main import main
from hybridflow.config.locate import shipped_config_dir, shipped_dir
from hybridflow.models.published import published
from hybridflow.planning import recipes
from tests.published.sparse import whole_size

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
IN_ONE_PROCESS = "tiny-rloo"
ADDRESS = "cluster.address=10.0.0.1:6379"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("an empty folder")
    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": f"Say {number}."}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), found / "train.parquet")
    return found


def words_for(name: str, folder: Path) -> list[str]:
    """What a user adds to a recipe, with a folder of the published model's size."""
    model = whole_size(folder / name, published(name.partition("-")[2].rpartition("-")[0]))
    files = f"[{folder / 'train.parquet'}]"
    own = ["data=files", f"data.train_files={files}", f"data.val_files={files}"]
    return ["--config-name", name, f"model.path={model}", *own]


def in_make_test() -> set[str]:
    """One recipe of each algorithm and type of model; `tests/unit/planning/test_recipes.py` plans
    all."""
    first: dict[tuple[str, str], str] = {}
    for name in recipes.names():
        algorithm, _, rest = name.partition("-")
        kind = published(rest.rpartition("-")[0])["model_type"]
        first.setdefault((algorithm, kind), name)
    return set(first.values())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in in_make_test() else [pytest.mark.full])
        for name in recipes.names()
    ],
)
def test_a_recipe_is_submitted_explained_and_planned(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = words_for(name, folder)
    assert main(["slurm", "render", *words]) == 0, capsys.readouterr().err
    script = capsys.readouterr().out
    checked = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    nodes, devices = map(int, name.rpartition("-")[2].split("x"))
    assert (
        f"#SBATCH --nodes={nodes}\n" in script and f"#SBATCH --gpus-per-node={devices}\n" in script
    )
    assert f"TRAIN=(train --config-name {name} " in script and "cluster.address" not in script
    for command in (["train", *words, "--explain"], ["plan", *words]):
        assert main(command) == 0, capsys.readouterr().err
        capsys.readouterr()


@pytest.mark.parametrize(
    "name", ["grpo-qwen3-8b-1x8", "grpo-qwen3-30b-a3b-2x8", "ppo-qwen3-8b-1x8"]
)
def test_a_size_recipe_renders_to_its_golden_file(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model, a mixture of experts and PPO, with the shipped site file."""
    monkeypatch.chdir(folder)
    launch = shipped_dir("launch") / "slurm"
    words = [word.replace(f"{folder}/", "") for word in words_for(name, folder)]
    assert main(["slurm", "render", *words, "--site", str(launch / "site.yaml")]) == 0
    text = capsys.readouterr().out.removesuffix((launch / "job.sh").read_text())
    text = text.replace(str(folder), "/data/a project").replace(
        sys.executable, "/apps/hybridflow/bin/python"
    )
    assert text == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="shellcheck is not installed: make setup-slurm brings it",
)
@pytest.mark.parametrize(
    "name", ["grpo-qwen3-8b-1x8", "grpo-qwen3-30b-a3b-4x8", "ppo-llama-3.1-70b-4x8"]
)
def test_shellcheck_finds_nothing_in_a_recipes_job(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["slurm", "render", *words_for(name, folder)]) == 0
    script = capsys.readouterr().out
    checked = subprocess.run(
        ["shellcheck", "-"], input=script, text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_a_cluster_that_the_user_names_is_refused_and_one_that_a_recipe_names_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = words_for("grpo-qwen3-8b-1x8", folder)
    assert main(["slurm", "render", *words, ADDRESS]) == 2
    assert "cluster.address=10.0.0.1:6379 is not supported with Slurm" in capsys.readouterr().err
    (folder / "mine").mkdir()
    recipe = (
        "defaults: [grpo-qwen3-8b-1x8, _self_]\nname: mine\ncluster: {address: '10.0.0.1:6379'}\n"
    )
    (folder / "mine/mine.yaml").write_text(recipe)
    assert (
        main(["slurm", "render", "--config-dir", "mine", "--config-name", "mine", *words[2:]]) == 0
    )
    shown = capsys.readouterr()
    assert (
        "ignoring the recipe's cluster.address=10.0.0.1:6379" in shown.err
        and "10.0.0.1" not in shown.out
    )


def test_a_recipe_for_one_process_names_the_command_that_submits_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert (shipped_config_dir() / f"{IN_ONE_PROCESS}.yaml").is_file()
    assert main(["slurm", "submit", "--config-name", IN_ONE_PROCESS]) == 2
    assert (
        f"sbatch --wrap='hybridflow train --config-name {IN_ONE_PROCESS}'"
        in capsys.readouterr().err
    )
