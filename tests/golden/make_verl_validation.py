"""Writes `verl_validation.json`: what verl 0.9.1 reports of several answers to each held-out
prompt.

Only `verl/trainer/ppo/metric_utils.py` is read: run as `python tests/golden/make_verl_validation.py
FOLDER` with the folder of the unpacked package.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).with_name("verl_validation.json")
NAMES = ("bootstrap_metric", "calc_maj_val", "process_validation_metrics")
PROMPTS = 40
SAMPLES = 8


def functions(package: Path) -> dict[str, Any]:
    """The functions by name; the rest of the module needs packages that these do not."""
    tree = ast.parse((package / "verl/trainer/ppo/metric_utils.py").read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES
    ]
    found: dict[str, Any] = {
        "np": np,
        "defaultdict": defaultdict,
        "partial": partial,
        "Any": Any,
        "Callable": Callable,
    }
    exec(compile(tree, "metric_utils.py", "exec"), found)
    return found


def main() -> None:
    """Write the answers and verl's metrics."""
    random = np.random.default_rng(0)
    scores = (random.random((PROMPTS, SAMPLES)) < random.random((PROMPTS, 1))).astype(float)
    answers = np.where(scores > 0, 0, random.integers(1, 4, scores.shape)).astype(str)
    uids = [str(prompt) for prompt in range(PROMPTS) for _ in range(SAMPLES)]
    given = {"score": scores.ravel().tolist(), "pred": answers.ravel().tolist()}
    found = functions(Path(sys.argv[1]))["process_validation_metrics"](
        ["toy"] * len(uids), uids, given
    )
    metrics = {name: float(value) for name, value in found["toy"]["score"].items()}
    whole = {
        "samples": SAMPLES,
        "scores": given["score"],
        "answers": given["pred"],
        "verl": metrics,
    }
    OUT.write_text(json.dumps(whole) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
