"""The fork server of engines imports SGLang with shortcuts, which change nothing but the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hybridflow.process.importing import without_compiler

CODE = """
import json, pkgutil, sys
from types import ModuleType
from hybridflow.engines.sglang import preload
from sglang.srt.plugins.hook_registry import HookRegistry

whole = str(preload._MODELS / "__init__.py")
originals = {id(pkgutil.resolve_name(target).__wrapped__): target for target in HookRegistry._patched}
unhooked = [
    f"{name}.{attribute}: {originals[id(value)]}"
    for name, module in list(sys.modules.items())
    if isinstance(module, ModuleType)
    for attribute, value in list(vars(module).items())
    if id(value) in originals
]
found = {
    "hooks": len(originals),
    "unhooked": unhooked,
    "files": preload.model_files(whole) == preload._search(whole),
    "one model": preload.model_files(whole.replace("models/", "models/llama/"))
    == preload._search(whole.replace("models/", "models/llama/")),
    "compiler": [name for name in sys.modules if name == "torch._inductor.compile_fx"],
}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_preloaded_modules_are_those_of_a_plain_import() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HYBRIDFLOW_PLATFORM": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("hooks") >= 10
    assert found == {"unhooked": [], "files": True, "one model": True, "compiler": []}


def test_the_user_may_enable_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    for value in ("0", "1"):
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", value)
        assert without_compiler() == {"TORCH_COMPILE_DISABLE": value, "TORCHDYNAMO_DISABLE": value}
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    assert set(without_compiler().values()) == {"1"}
