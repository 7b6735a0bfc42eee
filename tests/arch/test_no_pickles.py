"""No pickle is read, and no text is run as code, anywhere in our tree but where it is proven to be
the job's own."""

from __future__ import annotations

import ast

import pytest

from tests.arch.files import ROOT, nodes, python_files

TREES = ("hybridflow", "benchmarks", "kernels", "launch")
# what runs code that its argument brings, by the last names of the call
RUNS_CODE = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "pandas.read_pickle",
    "pd.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "dist_checkpointing.load",
    "torch.jit.load",
}
BY_METHOD = {"recv_pyobj", "read_pickle"}
BUILT_IN = {"eval", "exec", "compile"}
# file → call: why it may
ALLOWED = {
    # checked against an HMAC under the job's secret before it is read
    "hybridflow/process/signed_objects.py": {"pickle.Unpickler"},
    # programs of a model, in their sandbox
    "hybridflow/rewards/sandbox_process.py": {"compile", "exec"},
}


def reads(source: str) -> set[str]:
    """Calls that would run what a file or a peer says."""
    found = set()
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        last = ".".join(name.split(".")[-2:])
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if (
            name in BUILT_IN
            or last in RUNS_CODE
            or name in RUNS_CODE
            or name.split(".")[-1] in BY_METHOD
        ):
            found.add(last)
        if last == "torch.load" and not _is(keywords.get("weights_only"), True):
            found.add(last)
        if (
            last in ("np.load", "numpy.load")
            and "allow_pickle" in keywords
            and not _is(keywords["allow_pickle"], False)
        ):
            found.add(last)
        if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], False):
            found.add("trust_remote_code")
    return found


def imported(source: str) -> set[str]:
    """Names of such functions that are imported bare, which a call would not show."""
    return {
        f"{node.module}.{alias.name}"
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}" in RUNS_CODE
    }


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.slow
def test_nothing_reads_pickles_or_runs_text() -> None:
    files = python_files(*TREES)
    assert len(files) > 100
    found = {}
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        if bad := (reads(source) | imported(source)) - ALLOWED.get(name, set()):
            found[name] = bad
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle; pickle.loads(data)",
        "from pickle import loads",
        "pickle.Unpickler(file).load()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "eval(text)",
        "exec(text, {})",
        "socket.recv_pyobj()",
        "megatron.core.dist_checkpointing.load(state, path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_the_check_sees(line: str) -> None:
    assert reads(line) | imported(line)


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "re.compile(text)",
    ],
)
def test_the_check_lets_pass(line: str) -> None:
    assert not reads(line) | imported(line)
