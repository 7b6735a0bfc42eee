"""The data for Nim: piles of stones as prompts, and demonstrations of random legal moves, which
teach the format of a move but not which move is good."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hybridflow.data.prepare.rows import prompt_row, write_demonstrations, write_prompts
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer


@dataclass(frozen=True)
class Options:
    """Options of the data: piles of 1 to `largest` stones, and `num_sft` demonstrations drawn with
    `seed`."""

    largest: int = 12
    num_sft: int = 2000
    seed: int = 1


def write(options: Options, out: Path, source: Path | None) -> dict[str, int]:
    """Write train.parquet, sft.parquet and tokenizer/. Returns the number of rows in each parquet
    file."""
    del source
    rng = np.random.default_rng(options.seed)
    demonstrations: list[dict[str, Any]] = []
    for pile in rng.integers(1, options.largest + 1, options.num_sft).tolist():
        move = int(rng.integers(1, min(3, pile) + 1))
        messages = [{"role": "user", "content": str(pile)}]
        demonstrations.append({"prompt": messages, "response": str(move)})
    rows = [
        prompt_row("nim", str(pile), str(pile % 4 or 1), {"index": pile})
        for pile in range(1, options.largest + 1)
    ]
    write_character_tokenizer(out / "tokenizer", "0123456789=")
    return {
        "train.parquet": write_prompts(out / "train.parquet", rows, {"index": pa.int64()}),
        "sft.parquet": write_demonstrations(out / "sft.parquet", demonstrations),
    }


TASKS.register("piles", Task(Options, write))
