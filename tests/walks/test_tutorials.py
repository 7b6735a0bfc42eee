"""The tutorials, followed as they stand: their files written, their commands run, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.walks.transcript import Walk


@pytest.mark.slow
def test_a_job_for_four_nodes_is_planned_and_rendered(tmp_path: Path) -> None:
    # nothing is downloaded
    empty = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "cache")}
    Walk(tmp_path, env=empty).follow("docs/tutorials/four-nodes.md")


@pytest.mark.slow
@pytest.mark.full
def test_the_tutorials_of_one_run_are_followed_to_the_end(tmp_path: Path) -> None:
    walk = Walk(tmp_path, env={"OMP_NUM_THREADS": "1"})
    walk.follow("docs/tutorials/own-model.md")
    walk.follow("docs/tutorials/flat-reward.md")
    walk.follow("docs/tutorials/add-a-loss.md")
    walk.follow("docs/tutorials/another-layout.md")
