"""What the whole runs share: prepared data, and a reward that tells the samples of a prompt
apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from tests.e2e.runs import REWARD


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of the e2e recipe: data in a temporary folder, the reward above, steps large enough
    that stale weights would show."""
    folder: Path = tmp_path_factory.mktemp("e2e")
    (folder / "reward.py").write_text(REWARD)
    prepare("arithmetic", folder / "data", None, load_config("e2e").data.prepare.options)
    return [
        "--config-name",
        "e2e",
        f"data.prepare.out={folder / 'data'}",
        "reward=custom",
        f"reward.path={folder / 'reward.py'}",
        "actor.optim.lr=3e-3",
    ]
