"""Published data sets, in small files of their forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CHAT = [{"role": "user", "content": "What is 1+1? The last line must be Answer: $Answer"}]
DAPO = {
    "data_source": "math_dapo",
    "prompt": CHAT,
    "ability": "MATH",
    "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "2"},
}
CODE = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
EURUS = {
    **DAPO,
    "data_source": "taco",
    "ability": "code",
    "reward_model": {"ground_truth": CODE, "style": "rule"},
}
TARGET = {"target": ["Paris", "paris"]}
SEARCH = {**DAPO, "data_source": "nq", "reward_model": {"ground_truth": TARGET, "style": "rule"}}
HALF = r"\frac{1}{2}"
MATH = {
    "problem": "One half?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": rf"It is $\boxed{{{HALF}}}$.",
}
AIME = {"id": 1, "problem": "p", "url": "u"}
MBPP = {
    "text": "Add.",
    "code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 2) == 1"],
}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
HUMANEVAL = {"prompt": "def add(a, b):\n", "test": CHECK, "entry_point": "add"}


def gsm(answer: str) -> dict[str, str]:
    return {"question": "q", "answer": f"#### {answer}"}


Rows = dict[str, list[Any]]
FILES: dict[str, Rows] = {
    "dapo_math": {"data/dapo-math-17k.parquet": [DAPO] * 100},
    "math": {
        "data/train-0.parquet": [MATH],
        "data/test-0.parquet": [MATH],
        "algebra/train-0.parquet": [MATH] * 2,
    },
    "math500": {"test.jsonl": [{**MATH, "answer": HALF, "unique_id": "x"}]},
    "aime24": {"data/test-0.parquet": [{**AIME, "solution": r"\boxed{033}"}]},
    "aime25": {"test.jsonl": [{**AIME, "answer": "70"}]},
    "deepscaler": {"deepscaler.json": [{"problem": "p", "answer": "5", "solution": "s"}]},
    "search_r1": {"train.parquet": [SEARCH], "test.parquet": [SEARCH]},
    "gsm8k": {
        "main/train-0.parquet": [gsm("1,000")],
        "main/test-0.parquet": [gsm("1")],
        "socratic/test-0.parquet": [gsm("2")] * 3,
    },
    "eurus2_code": {"data/train-0.parquet": [EURUS, DAPO], "data/validation-0.parquet": [EURUS]},
    "mbpp": {
        "full/train-0.parquet": [MBPP],
        "full/test-0.parquet": [MBPP],
        "sanitized/test-0.parquet": [MBPP] * 2,
    },
    "humaneval": {"openai_humaneval/test-0.parquet": [HUMANEVAL]},
}


def fill(folder: Path, files: dict[str, list[dict[str, Any]]]) -> Path:
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            lines = "\n".join(map(json.dumps, rows))
            path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows, indent=1))
    return folder
