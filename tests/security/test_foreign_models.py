"""A model's folder of somebody else: each command that takes one ends with a result or one message,
in bounded time and memory, and prints nothing that steers a terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.security.foreign_models import HOSTILE

Ask = Callable[..., dict[str, tuple[int, int, str, str]]]
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
QUICK = ("plan", "reshard", "import")
SLOW = ("transfer", "auto", "file", "explain", "doctor")
FEW = ("every file: pipe", "hidden_size='x'", "index: outside", "header: offsets")


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks one process, which has what the commands need loaded."""
    words = [
        sys.executable,
        "-m",
        "tests.security.foreign_models",
        str(tmp_path_factory.mktemp("m")),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin is not None and process.stdout is not None

        def asked(*line: str) -> dict[str, tuple[int, int, str, str]]:
            print(json.dumps(line), file=process.stdin, flush=True)
            answers: dict[str, tuple[int, int, str, str]] = json.loads(process.stdout.readline())
            return answers

        yield asked
        process.stdin.close()


def check(answers: dict[str, tuple[int, int, str, str]]) -> None:
    for name, (status, code, out, err) in answers.items():
        assert status == 0, f"{name}: ended by {os.waitstatus_to_exitcode(status)} {err}"
        assert code in (0, 1, 2) and "Traceback" not in err, f"{name}: {code} {err}"
        # the doctor's verdict is its output
        assert (code != 0) == bool(err) or (name == "doctor" and out), f"{name}: {code} {err}"
        assert not STEERING.search(out + err), f"{name}: {out!r} {err!r}"


@pytest.mark.parametrize("kind", FEW)
def test_a_models_folder_of_somebody_else_is_one_message(ask: Ask, kind: str) -> None:
    answers = ask(kind, *QUICK)
    check(answers)
    assert any(code for _, code, _, _ in answers.values())


@pytest.mark.full
@pytest.mark.parametrize("kind", HOSTILE)
def test_every_command_reads_every_folder_within_bounds(ask: Ask, kind: str) -> None:
    check(ask(kind, *(("plan", "reshard", "explain") if "=" in kind else (*QUICK, *SLOW))))
