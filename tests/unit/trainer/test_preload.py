"""Which modules are loaded in advance, and where none are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.trainer.preload import Preload, modules_of


@pytest.mark.slow
def test_each_server_is_for_what_the_job_starts() -> None:
    config = load_config("tiny-moe-grpo")
    assert list(modules_of(config, with_engines=True)) == ["torch", "ranks", "engines"]
    assert list(modules_of(config, with_engines=False)) == ["torch", "ranks"]
    # an evaluation starts the servers before its settings are checked
    unknown = replace(config, rollout=replace(config.rollout, engine="sgland"))
    assert list(modules_of(unknown, with_engines=True)) == ["torch", "ranks"]
    own = load_config("tiny-moe-grpo", ["rollout.engine=engines/mine.py:engine"])
    # nobody knows what it would need
    assert list(modules_of(own, with_engines=True)) == ["torch", "ranks"]
    fsdp = load_config("tiny-dense-grpo-fsdp")
    assert not any("mcore" in name for name in modules_of(fsdp, with_engines=True)["ranks"])


def test_none_where_processes_run_elsewhere_or_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = load_config("tiny-moe-grpo", ["cluster.address=10.0.0.1:6379"])
    with Preload(joined, with_engines=True) as preload:
        assert {preload.name(kind) for kind in ("torch", "ranks", "engines")} == {""}
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))
    monkeypatch.delenv("HYBRIDFLOW_PLATFORM", raising=False)
    with Preload(load_config("tiny-moe-grpo"), with_engines=True) as preload:
        assert preload.name("ranks") == ""
