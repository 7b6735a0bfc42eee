"""What part 1 of `make gpu` imports is there on a GPU machine without a package index: the standard
library, what its image holds, and megatron-core. Ray, SGLang and hydra are not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.checks import CHECKS

ROOT = Path(__file__).parents[2]
# loaded by name when a check runs: by ranks, and by the command line
LOADED = (
    *(
        "tests.gpu.cases",
        "tests.dist.cases.transport",
        "tests.dist.harness.rank_server",
        "hybridflow.trainer.app",
    ),
    *("hybridflow.mcore.policy", "hybridflow.mcore.value_model", "hybridflow.mcore.checkpoint"),
    *(
        "hybridflow.mcore.hf_export",
        "hybridflow.sync.transports.cuda_ipc",
        "hybridflow.engines.hf.engine",
    ),
)
# import names of what the image holds (requirements/device.txt), and of the wheels of piece a that
# checks need
THERE = {
    *(
        "torch",
        "torchgen",
        "functorch",
        "triton",
        "transformers",
        "numpy",
        "pyarrow",
        "safetensors",
        "tokenizers",
    ),
    *(
        "pytest",
        "_pytest",
        "py",
        "pluggy",
        "iniconfig",
        "xdist",
        "execnet",
        "hypothesis",
        "sortedcontainers",
    ),
    *(
        "psutil",
        "yaml",
        "jinja2",
        "markupsafe",
        "packaging",
        "rich",
        "pygments",
        "tensorboard",
        "xxhash",
        "einops",
    ),
    *(
        "huggingface_hub",
        "filelock",
        "fsspec",
        "regex",
        "tqdm",
        "requests",
        "urllib3",
        "certifi",
        "idna",
        "h11",
    ),
    *(
        "charset_normalizer",
        "httpx",
        "httpcore",
        "anyio",
        "typing_extensions",
        "sympy",
        "mpmath",
        "networkx",
    ),
    *(
        "google",
        "absl",
        "grpc",
        "PIL",
        "sentencepiece",
        "setuptools",
        "pkg_resources",
        "cloudpickle",
        "attr",
        "attrs",
    ),
    *(
        "dateutil",
        "six",
        "jaraco",
        "more_itertools",
        "backports",
        "swig_runtime_data4",
        "cython_runtime",
    ),
    *("megatron", "httpx2", "httpcore2", "truststore", "sniffio", "dill", "soundfile"),
    *("hybridflow", "hybridflow_kernels", "tests"),
}
REPORT = """
import importlib, importlib.abc, json, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "sglang", "hydra", "omegaconf", "sgl_kernel", "transformer_engine", "colorama"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules() -> list[str]:
    """The modules that the commands of part 1 start, and those that they load by name."""
    started = {"hybridflow.cli.main", "tests.gpu.__main__"}
    for check in CHECKS:
        if check.part == 1:
            words = [word.removesuffix(".py").replace("/", ".") for word in check.command]
            started |= {word for word in words if word.startswith("tests.gpu.")}
    return sorted(started | set(LOADED))


def test_the_list_has_every_module_of_the_checks() -> None:
    files = {f"tests.gpu.{path.stem}" for path in (ROOT / "tests/gpu").glob("*.py")} - {
        "tests.gpu.__init__"
    }
    of_other_parts = {"tests.gpu.test_weights", "tests.gpu.weights"}
    imported = {
        alias
        for name in modules()
        if (path := ROOT / f"{name.replace('.', '/')}.py").exists()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in (node.module, *(f"{node.module}.{name.name}" for name in node.names))
    }
    assert files - of_other_parts <= {*modules(), *imported}


@pytest.mark.slow
def test_part_one_imports_nothing_that_the_machine_lacks() -> None:
    command = [sys.executable, "-c", REPORT, json.dumps(modules())]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = set(json.loads(done.stdout.splitlines()[-1]))
    foreign = {name for name in found - THERE - sys.stdlib_module_names if not name.startswith("_")}
    assert foreign == set()
