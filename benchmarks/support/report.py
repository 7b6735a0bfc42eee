"""Measured figures as a list of records, and the files they end up in."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.bench.run import RESULT_VARIABLE
from hybridflow.observe.environment import describe_environment
from support import conditions, peer

COUNTED = ("nbytes", "flops")  # left out of a figure that has none
RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Figure:
    """One result. `ratio` compares with the peer (above 1: ours is better), `share` says how much of the machine's
    `limit` is reached. `nbytes` and `flops` are counted, not measured: what the operation must move and compute at
    least."""

    metric: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    limit: float | None = None
    share: float | None = None
    nbytes: int | None = None
    flops: int | None = None


def faster(metric: str, ours: float, theirs: float, name: str, unit: str = "s", limit: float | None = None) -> Figure:
    """A figure of durations: smaller is better."""
    return Figure(metric, ours, unit, name, theirs, theirs / ours, limit, limit / ours if limit else None)


def median(values: list[float]) -> float:
    """The middle of at least five runs."""
    assert len(values) >= 5, "a median of fewer than five runs is not reported"
    return statistics.median(values)


def write(name: str, figures: list[Figure], conditions_text: Mapping[str, Any]) -> None:
    """`results/NAME.json`, the list of figures, and `results/NAME.environment.json` beside it; prints a table. Where
    `hybridflow bench run` asks, a list of figures where it says, and no other file."""
    rounded = [
        {key: _rounded(value) for key, value in asdict(figure).items() if value is not None or key not in COUNTED}
        for figure in figures
    ]
    asked = os.environ.get(RESULT_VARIABLE)
    target = Path(asked) if asked else RESULTS / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(rounded, indent=2) + "\n")
    environment = describe_environment() | {
        "peer": peer.versions(),
        "conditions": {**conditions.REQUIRED, **conditions_text},
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }
    target.with_name(f"{target.stem}.environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    for row in rounded:
        against = f"  {row['peer']}: {row['peer_value']}  ratio {row['ratio']}" if row["peer"] else ""
        share = f"  limit {row['limit']}  share {row['share']}" if row["limit"] is not None else ""
        print(f"{row['metric']:<58} {row['value']} {row['unit']}{against}{share}")


def _rounded(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value
