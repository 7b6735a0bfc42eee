"""Programs with three tests each: the verifier `code`, whose sandbox is a process that forks, against verl's
prime_code, which starts two processes for each program and isolates nothing."""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import json
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.bench.measurements.base import interleaved
from hybridflow.rewards.verifiers.code import code
from support import peer
from support.report import Figure, faster, median, write

ROUNDS, PROGRAMS = 5, 4
RIGHT = "n = int(input())\nprint(sum(number * number for number in range(n)))\n"
WRONG = RIGHT.replace("range(n)", "range(n + 1)")
FUNCTION = "def squares(n):\n    return [number * number for number in range(n)]\n"
PRINTED = {"inputs": ["3\n", "10\n", "100\n"], "outputs": ["5\n", "285\n", "328350\n"]}
RETURNED = {"fn_name": "squares", "inputs": ["1", "2", "3"], "outputs": ["[0]", "[0, 1]", "[0, 1, 4]"]}
CASES: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "that read and print": (RIGHT, PRINTED, True),
    "that are wrong": (WRONG, PRINTED, False),
    "of a function": (FUNCTION, RETURNED, True),
}


def main() -> None:
    """All figures."""
    peer.install()
    from verl.utils.reward_score.prime_code import compute_score

    figures: list[Figure] = []
    for name, (program, tests, is_right) in CASES.items():
        response, truth = f"```python\n{program}```", json.dumps(tests)

        def ours(response: str = response, truth: str = truth, is_right: bool = is_right) -> None:
            for _ in range(PROGRAMS):
                found = code(response, truth)
                assert found.score == float(is_right), found

        def theirs(response: str = response, truth: str = truth, is_right: bool = is_right) -> None:
            for _ in range(PROGRAMS):
                found, _ = compute_score(response, truth, continuous=True)  # without it, a wrong program is an error
                assert float(found) == float(is_right)

        sides: dict[str, Callable[[], None]] = {"ours": ours, "peer": theirs}
        seconds = {side: median(found) / PROGRAMS for side, found in interleaved(sides, ROUNDS).items()}
        figures.append(faster(f"programs {name}, three tests", seconds["ours"], seconds["peer"], peer.NAME))
    write("code_rewards", figures, {"rounds": ROUNDS, "programs a round": PROGRAMS, "statistic": "median"})


if __name__ == "__main__":
    main()
