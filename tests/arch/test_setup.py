"""requirements/setup.sh installs once, again after a change or a failure; requirements/verify.py
sees what does not belong."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEXT_MEGATRON = "requirements/megatron-0.19.txt"
TRACKERS = "requirements/trackers.txt"
# Stands for the interpreter of .venv: notes what it is asked to do and fails when told to.
STUB = """#!/usr/bin/env bash
echo "$*" >> calls
[[ $* == *"$(cat fail_on 2>/dev/null || echo NOTHING)"* ]] && exit 1
exit 0
"""


class Tree:
    """A copy of what setup needs, around a stub of .venv/bin/python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(
            ROOT / "requirements",
            folder / "requirements",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        shutil.copy(ROOT / "setup.py", folder)
        stub = folder / ".venv" / "bin" / "python"
        stub.parent.mkdir(parents=True)
        stub.write_text(STUB)
        stub.chmod(0o755)

    def setup(self, *words: str, uv: str | Path = "no") -> tuple[int, list[str]]:
        """Exit status, and what was installed or verified."""
        calls = self.folder / "calls"
        calls.write_text("")
        command = [self.folder / "requirements" / "setup.sh", *words]
        env = {**os.environ, "UV": str(uv)}
        result = subprocess.run(command, env=env, capture_output=True, check=False)
        return result.returncode, [
            line for line in calls.read_text().splitlines() if "--version" not in line
        ]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def verify() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify", ROOT / "requirements" / "verify.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_is_installed_first_and_checked_before_the_rest(tree: Tree) -> None:
    code, calls = tree.setup("cpu")
    assert code == 0
    installs = [call.split()[-1] for call in calls if " install " in call]
    assert installs == [
        "requirements/build.txt",
        "requirements/torch-cpu.txt",
        "requirements/cpu.txt",
        ".",
    ]
    assert all("--no-deps" in call for call in calls if " install " in call)
    assert "verify.py cpu requirements/torch-cpu.txt" in calls[2]


def test_a_second_setup_installs_nothing(tree: Tree) -> None:
    tree.setup("cpu", "dev")
    assert tree.setup("cpu", "dev") == (0, [])
    assert tree.setup("cpu") == (0, [])


def test_development_tools_come_on_top(tree: Tree) -> None:
    tree.setup("cpu")
    _, calls = tree.setup("cpu", "dev")
    installs = [call.split()[-1] for call in calls if " install " in call]
    assert installs == ["requirements/dev.txt", TRACKERS, NEXT_MEGATRON]


@pytest.mark.slow
def test_the_other_lanes_megatron_is_unpacked_beside_the_cpu_lane_alone(tree: Tree) -> None:
    [unpacked] = [call for call in tree.setup("cpu", "dev")[1] if call.endswith(NEXT_MEGATRON)]
    assert (
        "--target .venv/megatron-0.19 --python-version 3.12 --ignore-requires-python "
        "--only-binary=:all:"
    ) in unpacked
    assert not any(NEXT_MEGATRON in call for call in tree.setup("gpu", "dev")[1])
    wanted = [
        line for line in (ROOT / NEXT_MEGATRON).read_text().splitlines() if not line.startswith("#")
    ]
    assert set(wanted) <= set((ROOT / "requirements" / "gpu.txt").read_text().splitlines())


@pytest.mark.parametrize(("lane", "version"), [("cpu", "3.11"), ("gpu", "3.12")])
def test_each_lane_takes_the_python_of_its_lock(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, lane: str, version: str
) -> None:
    shutil.rmtree(tree.folder / ".venv")
    (tree.folder / "bin").mkdir()
    for found in ("3.11", "3.12"):
        python = tree.folder / "bin" / f"python{found}"
        # makes an environment, whose interpreter is the stub
        stub = shlex.quote(STUB)
        python.write_text(
            "#!/usr/bin/env bash\n"
            f"[[ $1 == -c ]] && {{ echo {found}; exit; }}\n"
            f'echo "$0 $*" >> made; mkdir -p "$3/bin"; printf %s {stub} > "$3/bin/python"; chmod '
            '+x "$3/bin/python"\n'
        )
        python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tree.folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHON", raising=False)
    made = tree.folder / "made"
    assert tree.setup(lane)[0] == 0
    assert made.read_text().split()[0].endswith(f"/python{version}")
    # of a lock for another Python
    (tree.folder / ".venv" / "pyvenv.cfg").write_text("version = 3.10.2\n")
    (tree.folder / ".venv" / ".hybridflow-setup").unlink()
    assert tree.setup(lane)[0] == 0
    assert len(made.read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    ["requirements/cpu.txt", "requirements/torch-cpu.txt", "requirements/build.txt", "setup.py"],
)
def test_a_changed_lock_installs_again(tree: Tree, changed: str) -> None:
    tree.setup("cpu", "dev")
    with (tree.folder / changed).open("a") as file:
        file.write("# changed\n")
    _, calls = tree.setup("cpu", "dev")
    assert len([call for call in calls if " install " in call]) == 7


@pytest.mark.parametrize("fails", [False, True])
def test_uv_installs_the_locks_after_pips_torch_and_pip_what_uv_does_not_find(
    tree: Tree, fails: bool
) -> None:
    uv = tree.folder / "uv"
    uv.write_text(f'#!/usr/bin/env bash\necho "uv $*" >> calls\nexit {int(fails)}\n')
    uv.chmod(0o755)
    code, calls = tree.setup("cpu", "dev", uv=uv)
    assert code == 0
    installs = [
        f"{'uv' if call.startswith('uv') else 'pip'} {call.split()[-1]}"
        for call in calls
        if "install" in call
    ]
    locks = ["requirements/cpu.txt", "requirements/dev.txt"]
    assert [name for name in installs if name.startswith("uv")] == [f"uv {lock}" for lock in locks]
    assert [f"pip {lock}" in installs for lock in locks] == [fails, fails]
    assert installs.index("pip requirements/torch-cpu.txt") < installs.index(
        "uv requirements/cpu.txt"
    )
    assert all("--no-deps --no-build-isolation" in call for call in calls if call.startswith("uv"))
    assert calls[-1].endswith(
        "verify.py cpu requirements/build.txt requirements/cpu.txt requirements/torch-cpu.txt "
        "requirements/dev.txt"
    )


@pytest.mark.parametrize(
    "step",
    [
        "requirements/cpu.txt",
        "verify.py",
        "install -qq --no-input --disable-pip-version-check --no-deps --no-build-isolation -e .",
    ],
)
def test_a_setup_that_failed_is_done_again(tree: Tree, step: str) -> None:
    (tree.folder / "fail_on").write_text(step)
    assert tree.setup("cpu")[0] != 0
    (tree.folder / "fail_on").unlink()
    code, calls = tree.setup("cpu")
    assert code == 0
    assert calls


ENGINE = "requirements/transformer-engine.txt"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc."""
    path = tmp_path / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return path


def test_transformer_engine_is_built_once_where_there_is_a_compiler(
    tree: Tree, compiler: Path
) -> None:
    _, calls = tree.setup("gpu")
    (build,) = [call for call in calls if ENGINE in call]
    assert " wheel " in build and "--no-build-isolation" in build and "--no-deps" in build
    folder = tree.folder / build.split(" -w ")[1].split()[0]
    assert calls.index(build) > next(
        n for n, call in enumerate(calls) if call.endswith("requirements/gpu.txt")
    )
    assert any(
        " install " in call and f"{folder.name}/" in call for call in calls[calls.index(build) :]
    )
    assert tree.setup("gpu") == (0, [])
    folder.mkdir(parents=True)
    (folder / "transformer_engine_torch-2.20.2-cp312-linux_x86_64.whl").touch()
    for stamp in (tree.folder / ".venv").glob(".hybridflow-setup*"):
        stamp.unlink()
    _, again = tree.setup("gpu")  # a new environment takes the wheel that was kept
    assert not any(" wheel " in call for call in again) and any(
        "transformer_engine_torch" in call for call in again
    )


def test_the_cpu_lane_builds_no_transformer_engine(tree: Tree, compiler: Path) -> None:
    assert not any(ENGINE in call for call in tree.setup("cpu")[1])


def test_a_transformer_engine_that_does_not_build_stops_nothing_and_is_tried_again(
    tree: Tree, compiler: Path
) -> None:
    (tree.folder / "fail_on").write_text(" wheel ")
    assert tree.setup("gpu")[0] == 0
    (tree.folder / "fail_on").unlink()
    code, calls = tree.setup("gpu")
    assert code == 0 and [ENGINE in call for call in calls] == [True, False]


def test_an_unknown_lane_is_refused(tree: Tree) -> None:
    assert tree.setup("tpu") == (2, [])


def test_verify_names_absent_and_other_versions(verify: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "# "
        f"comment\nhydra-core=={metadata.version('hydra-core')}\nrich==0.0.1\nno-such-package==1\n"
    )
    absent, other = sorted(verify.lock_problems(lock))
    assert absent == f"no-such-package is not installed; {lock} asks for 1"
    assert other.startswith(f"rich {metadata.version('rich')} is installed")


def test_verify_sees_nvidia_packages_and_cuda_torch(
    verify: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\n")
    (tmp_path / "NVIDIA_nccl-1.0.dist-info").mkdir()
    (tmp_path / "NVIDIA_nccl-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: NVIDIA_nccl\nVersion: 1.0\n"
    )
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    package, torch = verify.cuda_problems()
    assert package.startswith("nvidia-nccl is installed")
    assert "torch 2.13.0 is built for CUDA 13.0" in torch
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    shutil.rmtree(tmp_path / "NVIDIA_nccl-1.0.dist-info")
    assert verify.cuda_problems() == []


@pytest.mark.parametrize(
    ("holds", "words", "lane"),
    [(None, (), "cpu"), ("gpu", (), "gpu"), ("gpu", ("LANE=cpu",), "cpu")],
)
def test_make_keeps_to_the_lane_that_the_environment_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holds: str | None,
    words: tuple[str, ...],
    lane: str,
) -> None:
    for name in ("LANE", "MAKEFLAGS", "MAKELEVEL"):  # of the make that runs the tests
        monkeypatch.delenv(name, raising=False)
    shutil.copy(ROOT / "Makefile", tmp_path)
    if holds is not None:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / ".hybridflow-lane").write_text(f"{holds}\n")
    said = subprocess.run(
        ["make", "-n", "setup-dev", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.splitlines()[0] == f"requirements/setup.sh {lane} dev"
