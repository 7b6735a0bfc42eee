"""What tests of several ranks share."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

# by requirements/setup.sh on the cpu lane; the gpu lane has it installed
UNPACKED = Path(sys.prefix) / "megatron-0.19"


@pytest.fixture(params=["installed", "0.19"])
def megatron(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of Megatron-Core that ranks import."""
    installed = metadata.version("megatron-core")
    if request.param == "installed":
        return installed
    if installed.startswith("0.19."):
        pytest.skip("the installed Megatron-Core is the one of the gpu lane")
    # absent: run `make setup-dev`
    [unpacked] = metadata.distributions(name="megatron-core", path=[str(UNPACKED)])
    path = [str(UNPACKED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return unpacked.version
