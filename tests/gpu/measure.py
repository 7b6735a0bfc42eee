"""How the checks measure, and the line of figures that each prints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

REHEARSAL = "--rehearse" in sys.argv
DEVICE = "cpu" if REHEARSAL else "cuda"


def result(figures: dict[str, Any]) -> None:
    """Print the figures for `make gpu`. Called more than once, the last call counts: a check that
    fails later has left what it had."""
    print("RESULT " + json.dumps(figures), flush=True)


def seconds(form: Callable[[], Any], rounds: int = 7) -> float:
    """Median of some runs on the device, after two that compile and warm up."""
    rounds = 1 if REHEARSAL else rounds
    for _ in range(min(2, rounds)):
        form()
    return sorted(_timed(form) for _ in range(rounds))[rounds // 2]


def _timed(form: Callable[[], Any]) -> float:
    if DEVICE == "cpu":
        begun = time.perf_counter()
        form()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    form()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
