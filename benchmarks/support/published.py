"""Published figures of other systems, read from `benchmarks/published.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PUBLISHED: dict[str, Any] = yaml.safe_load(
    Path(__file__).parents[1].joinpath("published.yaml").read_text(encoding="utf-8")
)


def sync_seconds(system: str, model: str) -> float:
    """Return the fastest published time, in seconds, in which a system syncs the weights of a
    model."""
    return float(min(PUBLISHED["syncs"][system][model]))
