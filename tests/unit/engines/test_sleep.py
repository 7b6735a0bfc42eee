"""What an engine gives back when it sleeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.engines.sglang.engine import SglangEngine
from hybridflow.engines.spec import EngineSpec


@pytest.mark.parametrize(("device", "graphs"), [("cuda", ["cuda_graph"]), ("cpu", [])])
def test_graphs_go_with_the_weights_and_come_back_with_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, graphs: list[str]
) -> None:
    engine = SglangEngine(
        EngineSpec(name="e", model_path="m", device=device, memory_saver=True),
        tmp_path / "log",
        lambda: None,
    )
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        engine.client, "_request", lambda path, body: asked.append((path, body.get("tags")))
    )
    engine.sleep()
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    assert asked == [
        ("/flush_cache?timeout=30", None),  # 0 would be refused while the last batch is still held
        ("/release_memory_occupation", ["kv_cache", "weights", *graphs]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache", *graphs]),
    ]
