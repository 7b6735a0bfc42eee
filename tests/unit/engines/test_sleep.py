"""What an engine gives back when it sleeps."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.slow
def test_a_server_does_not_import_megatron() -> None:
    """On an H100 the scheduler's dumper imported it, and Megatron's inference code took from
    torch_memory_saver the mode that can release CUDA graphs."""
    code = (
        "import sys, types\n"
        "saver = types.ModuleType('torch_memory_saver')\n"
        "saver.torch_memory_saver = types.SimpleNamespace(hook_mode='preload')\n"
        "sys.modules['torch_memory_saver'] = saver\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.debug_utils import dumper\n"
        "print([name for name in sys.modules if name.startswith('megatron.')])\n"
        "print(dumper._MegatronPlugin._available, saver.torch_memory_saver.hook_mode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-2:] == ["[]", "False preload"]
