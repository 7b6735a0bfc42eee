"""vLLM as an engine, and the only room that imports vllm.

Importing this package imports little: vLLM's own processes import parts of it (`door`, `worker`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.engines.base import ENGINES, Engine

if TYPE_CHECKING:
    from hybridflow.engines.spec import EngineSpec


def _engine(spec: EngineSpec, log_path: Path, check: Callable[[], None]) -> Engine:
    from hybridflow.engines.vllm.engine import VllmEngine

    return VllmEngine(spec, log_path, check)


ENGINES.register("vllm", _engine)
