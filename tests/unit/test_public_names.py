"""`import hybridflow` is light, and offers the decorators of a user's own files by one name each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import hybridflow

STUB = Path(hybridflow.__file__).with_suffix(".pyi")


def test_each_name_is_found_and_typed() -> None:
    typed = re.findall(r"^from (\S+) import (\w+) as \2$", STUB.read_text(), re.MULTILINE)
    assert {name: module for module, name in typed} == hybridflow._MODULES
    for name, module in hybridflow._MODULES.items():
        assert getattr(hybridflow, name).__module__.startswith(module), name
        assert name in dir(hybridflow)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(hybridflow, "flows_of")


def test_importing_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, hybridflow; hybridflow.flow; "
        "assert not {'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
