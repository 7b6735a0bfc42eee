"""SGLang as an engine, and the only room that imports sglang.

Importing this package imports little: SGLang's own processes import it early, through the entry points of `cpu_plugin`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.engines.base import ENGINES, Engine

if TYPE_CHECKING:
    from hybridflow.engines.spec import EngineSpec


def _engine(spec: EngineSpec, log_path: Path, check: Callable[[], None]) -> Engine:
    from hybridflow.engines.sglang.engine import SglangEngine

    return SglangEngine(spec, log_path, check)


ENGINES.register("sglang", _engine)
