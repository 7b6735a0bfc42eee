"""GSM8K's strict mode on a corpus: forty forms of each answer, right and wrong, over answers of the
dataset's kinds.

With HYBRIDFLOW_GSM8K, a folder with the published train.jsonl and test.jsonl, the answers are all
of theirs (8,792), and each published solution is judged as well.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from hybridflow.rewards.verifiers.base import VERIFIERS

RIGHT = (
    *(
        "#### {n}",
        "####{n}",
        "####   {n}  ",
        "#### {n}.",
        "#### {n}\n",
        "####\n{n}",
        "#### ${n}",
        "#### $ {n}",
    ),
    *(
        "#### {commas}",
        "#### ${commas}.",
        "#### {exact}",
        "#### ${exact}",
        "#### {n} dollars",
        "#### {n} m2",
    ),
    *("#### {n} cm3", "#### {n}%", "#### {n} dollars for 2 eggs", "#### {n} miles in 3.5 hours"),
    *(
        "#### {n} (per 100 people)",
        "#### {n} dollars.\n\nI hope that helps 5 people.",
        "#### {n}\n\n#### Explanation",
    ),
    *(
        "#### {n}\n\n#### Explanation\nThere are 2 cows.",
        "#### 7\nNo, wait.\n#### {n}",
        "2 + 2 = 4 <<2+2=4>>\n#### {n}",
    ),
)
WRONG = (
    *(
        "",
        "{n}",
        "####",
        "## {n}",
        "The answer is {n}.",
        "#### the answer is {n}",
        "#### {other}",
        "#### {negated}",
    ),
    *(
        "#### {n} or {other}",
        "#### {n} (or {other})",
        "#### {n}/7",
        "#### {n} to {other}",
        "#### {n}, {other}",
    ),
    *(
        "#### {n} = {other}",
        "#### {n} dollars and 50 cents",
        "#### --{n}",
        "#### {n} {other}",
        "#### {n}\n#### {other}",
    ),
    *("#### {n}7", "#### {n} x2"),
)


def published(folder: Path) -> Iterator[tuple[str, str]]:
    for split in ("train", "test"):
        for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            yield solution.rpartition("####")[2].strip().replace(",", ""), solution


def generated() -> Iterator[tuple[str, str]]:
    """Whole numbers of one to seven digits, decimals and negative numbers, in solutions as the
    dataset writes them."""
    draw = random.Random(0)
    for row in range(200):
        number = draw.randrange(1, 10 ** (1 + row % 7))
        text = f"{number}.{draw.randrange(1, 100):02}" if row % 10 == 9 else str(number)
        text = f"-{text}" if row % 25 == 24 else text
        written = f"{Decimal(text):,}"
        yield text, f"Half of it is <<{number}/2={number / 2:g}>>{number / 2:g}.\n#### {written}"


def forms(text: str) -> dict[str, str]:
    number = Decimal(text)
    exact = text if "." in text else f"{text}.00"
    return {
        "n": text,
        "commas": f"{number:,}",
        "exact": exact,
        "other": str(number + 1),
        "negated": str(-number),
    }


def test_forty_forms_of_every_answer() -> None:
    judge = VERIFIERS.get("gsm8k").function
    folder = os.environ.get("HYBRIDFLOW_GSM8K")
    rows = list(published(Path(folder)) if folder else generated())
    assert len(rows) == (8792 if folder else 200) and len(RIGHT) + len(WRONG) >= 40
    wrong: list[tuple[str, str]] = []
    for text, solution in rows:
        given = forms(text)
        if judge(solution, text).score != 1:
            wrong.append((text, solution))
        wrong += [(text, form) for form in RIGHT if judge(form.format(**given), text).score != 1]
        zero = Decimal(text) == 0  # is its own negation, and may be written with more digits
        refused = [form for form in WRONG if not (zero and form == "#### {negated}")]
        wrong += [(text, form) for form in refused if judge(form.format(**given), text).score != 0]
    assert not wrong, f"{len(wrong)} judged wrongly, the first of them {wrong[:5]}"
