"""A Hugging Face cache with the model and the data sets of recipes, as they are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.config.load import load_config
from tests.hub_cache import adopt
from tests.published.folders import published_folder

# `hybridflow WORDS` as a command
MAIN = "import sys; from hybridflow.cli.main import main; sys.exit(main(sys.argv[1:]))"
# the models' families, as tests/published knows them
FAMILIES = {
    "grpo-qwen3-8b-1x8": "qwen3",
    "grpo-qwen2.5-0.5b-1x8": "qwen2.5",
    "grpo-llama-3.1-405b-28x8": "llama-3.1",
    "grpo-mixtral-8x7b-2x8": "mixtral",
    "ppo-qwen3-30b-a3b-4x8": "qwen3-moe",
    "grpo-moonlight-16b-a3b-1x8": "moonlight",
    "grpo-glm-4.5-air-8x8": "glm-4.5",
    "grpo-deepseek-v3-32x8": "deepseek-v3",
}


def _solved(number: int) -> dict[str, str]:
    return {"problem": f"What is {number} + 1?", "level": "Level 1", "type": "Algebra",
            "solution": rf"It is $\boxed{{{number + 1}}}$."}  # fmt: skip


def _dapo(number: int) -> dict[str, Any]:
    question = f"Solve the problem. The last line is Answer: $Answer.\n\nWhat is {number} + 1?"
    return {
        **{
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": question}],
            "ability": "MATH",
        },
        "reward_model": {"ground_truth": str(number + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(number)},
    }


# {hub id: {file: its rows}} in the published form
SETS: dict[str, dict[str, Callable[[int], dict[str, Any]]]] = {
    "BytedTsinghua-SIA/DAPO-Math-17k": {"data/dapo-math-17k.parquet": _dapo},
    "math-ai/aime24": {
        "data/test-00000-of-00001.parquet": lambda n: {"id": n, **_solved(n), "url": "u"}
    },
    "math-ai/aime25": {
        "test.jsonl": lambda n: {"problem": f"Is it {n}?", "answer": str(n), "id": str(n)}
    },
    "DigitalLearningGmbH/MATH-lighteval": {
        "data/train-00000-of-00001.parquet": _solved,
        "data/test-00000-of-00001.parquet": lambda n: _solved(n + 100),
    },
    "HuggingFaceH4/MATH-500": {
        "test.jsonl": lambda n: {
            **_solved(n + 200),
            "answer": str(n + 201),
            "subject": "Algebra",
            "unique_id": str(n),
        }
    },
    "openai/gsm8k": {
        f"main/{split}-00000-of-00001.parquet": lambda n: {
            "question": f"{n} + 1?",
            "answer": f"So.\n#### {n + 1}",
        }
        for split in ("train", "test")
    },
}


def laid(folder: Path, recipe: str) -> Path:
    """A Hugging Face cache with the recipe's model, tiny, and with all data sets."""
    cache = folder / "hf" / "hub"
    model = load_config(recipe).model.path
    assert model is not None
    adopt(cache, model, published_folder(FAMILIES[recipe], folder / "model"))
    for repository, files in SETS.items():
        raw = folder / "raw" / repository
        for name, row in files.items():
            rows = [row(number) for number in range(12)]
            file = raw / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".parquet":
                pq.write_table(pa.Table.from_pylist(rows * (3 if row is _dapo else 1)), file)
            else:
                file.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
        adopt(cache, repository, raw, "datasets")
    return folder / "hf"
