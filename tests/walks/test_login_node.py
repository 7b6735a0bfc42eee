"""The login node: the wheel by `pip install` in a bare environment, then every command, and a
program. Each answers, or says which extra brings what it needs."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.models.published import published
from tests.published.sparse import whole_size
from tests.walks.package import ROOT, installed, run, succeed, wheel_of

pytestmark = pytest.mark.slow
RECIPE = "grpo-qwen3-8b-1x8"
MINE = "model.path=model data=files data.train_files=[train.parquet] data.val_files=[train.parquet]"
ANSWERS = (
    "version",
    "train",
    f"train --config-name {RECIPE} --print-config",
    f"train --config-name {RECIPE} --explain {MINE}",
    f"plan --config-name {RECIPE} {MINE}",
    "plan --recipes",
    f"slurm render --config-name {RECIPE} {MINE}",
    "slurm render --bench preflight",
    "bench list",
    "config schema",
    "checkpoint --help",
    "reshard plan --help",
)
# the command, its status, and what it must say
REFUSALS = (
    (
        f"train --config-name {RECIPE} {MINE}",
        2,
        "needs torch, which is not installed here: pip install 'hybridflow[train]'",
    ),
    ("sft --config-name tiny-moe-grpo", 2, "pip install 'hybridflow[train]'"),
    ("train-reward --config-name tiny-moe-reward", 2, "pip install 'hybridflow[train]'"),
    ("checkpoint import model imported", 2, "pip install 'hybridflow[train]'"),
    ("prepare arithmetic --out data", 2, "pip install 'hybridflow[train]'"),
    ("bench run preflight", 2, "pip install 'hybridflow[bench]'"),
    ("doctor", 1, "torch"),
    ("report nowhere", 2, "nowhere: no such run folder"),
    ("replay nowhere 1", 2, "nowhere is not a run folder"),
    ("slurm logs 12", 1, "pass the job ID"),
    ("train --config-name no-such-recipe", 2, "recipe no-such-recipe not found"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves folders behind."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    names = (
        "configs",
        "launch",
        "kernels",
        "hybridflow",
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
    )
    source.mkdir()
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    succeed([sys.executable, "setup.py", "-q", "sdist"], source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    return wheel_of(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("venv") / "bare")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with a model of a published size, and prompts."""
    whole_size(tmp_path / "model", published("qwen3-8b"))
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "Say yes."}],
        "extra_info": {"index": 0},
    }
    row["reward_model"] = {"style": "rule", "ground_truth": "yes"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        # all recipes' plans are those of tests/unit/planning/test_recipes.py
        pytest.param(command, marks=[pytest.mark.full] if "--recipes" in command else [])
        for command in ANSWERS
    ],
)
def test_a_bare_environment_answers(python: Path, folder: Path, command: str) -> None:
    done = run([str(python.parent / "hybridflow"), *command.split()], folder)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("command", "status", "said"), REFUSALS)
def test_what_it_lacks_is_named(
    python: Path, folder: Path, command: str, status: int, said: str
) -> None:
    done = run([str(python.parent / "hybridflow"), *command.split()], folder)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == status and said in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )


def test_python_m_and_an_install_into_a_folder_find_the_recipes(
    wheel: Path, python: Path, folder: Path
) -> None:
    assert succeed([str(python), "-m", "hybridflow", "version"], folder).startswith("hybridflow ")
    target = folder / "site"
    words = ["--no-deps", "--disable-pip-version-check", "--target", str(target), str(wheel)]
    succeed([str(python), "-m", "pip", "install", "-q", *words], folder)
    bare = run(
        [sys.executable, "-S", "-m", "hybridflow", "train"], folder, {"PYTHONPATH": str(target)}
    )
    assert bare.returncode == 0 and RECIPE in bare.stdout, bare.stderr
    shipped = target / "hybridflow/shipped/launch"
    assert (shipped / "containers/Dockerfile").is_file() and (shipped / "slurm/job.sh").is_file()
    assert (target / "hybridflow/py.typed").is_file() and (
        target / "hybridflow_kernels/digest.py"
    ).is_file()


PROGRAM = """
import hybridflow as hf

run = hf.Run(recipe="tiny-moe-grpo", cluster="in-process", reward=lambda **row: 1.0)
print(run.folder)
for begin in (run.train, lambda: next(run.steps()), lambda: run.generate(["1+1="]), run.evaluate):
    try:
        begin()
    except hf.HybridFlowError as error:
        print(error)
"""


def test_a_program_is_told_what_to_install(python: Path, tmp_path: Path) -> None:
    said = succeed([str(python), "-c", PROGRAM], tmp_path).splitlines()
    needs = (
        "hybridflow.Run needs torch, which is not installed here: pip install 'hybridflow[train]'"
    )
    assert said == ["runs/tiny-moe-grpo", *[needs] * 4]
    # nothing has begun: no folder of a run
    assert [path.name for path in tmp_path.iterdir()] == ["runs"] and not (
        tmp_path / "runs/tiny-moe-grpo"
    ).exists()


@pytest.mark.full
def test_with_the_packages_of_the_extras_the_example_trains(python: Path, tmp_path: Path) -> None:
    """The wheel's own code, with the libraries of this environment."""
    shutil.copy(ROOT / "examples/one_step.py", tmp_path)
    site = sysconfig.get_path("purelib")
    code = (
        f"import sys; sys.path.append({site!r})\n"
        "import hybridflow; print(hybridflow.__file__)\n"
        "import runpy; runpy.run_path('one_step.py', run_name='__main__')\n"
    )
    said = succeed([str(python), "-c", code], tmp_path)
    assert "step 5: 32 samples" in said
    assert said.startswith(str(python.parents[1]))
