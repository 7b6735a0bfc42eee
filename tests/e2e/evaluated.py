"""Evaluations and servers of a finished run, as a user starts them from another folder."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import openai

from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import LOOPBACK, Run

FIRST_ANSWER_S = 10.0


def validated(folder: Path) -> dict[str, Any]:
    """The metrics of the run's last validation."""
    records = [
        record for record in read_jsonl(folder / "metrics.jsonl") if record["phase"] == "val"
    ]
    return {name: value for name, value in records[-1].items() if name.startswith("val")}


def evaluation(cwd: Path, *words: str, exit_code: int = 0) -> tuple[str, dict[str, Any]]:
    """What `hybridflow eval` prints, and its results."""
    cwd.mkdir(exist_ok=True)
    with Run(cwd / "output", "eval", *words, cwd=cwd) as run:
        assert run.end(240) == exit_code, run.out + run.err
        assert run.left_behind() == []
        said = run.out + run.err
        if exit_code:
            assert "Traceback" not in said
            return said, {}
        [file] = re.findall(r"^results: (.*)$", run.out, re.MULTILINE)
        results: dict[str, Any] = json.loads((cwd / file).read_text())
        return run.out, results


def evaluates_as_it_validated(folder: Path, *words: str) -> dict[str, Any]:
    """The run's latest checkpoint, evaluated from elsewhere: every metric of its last validation to
    the last digit, and every answer."""
    latest = str(folder / "checkpoints" / "latest")
    out, results = evaluation(folder.parent / "elsewhere", latest, "--run-code", "--dump", *words)
    own = validated(folder)
    assert results["metrics"] == own and own
    step = results["step"]
    for one in folder.glob(f"validation*/step_{step:06d}.parquet"):
        again = folder / "eval" / f"global_step_{step}" / one.relative_to(folder)
        texts = [
            [
                (row["prompt_text"], row["response_text"], row["score"])
                for row in read_rollouts(path)
            ]
            for path in (one, again)
        ]
        assert texts[0] == texts[1] and texts[0]
    assert "first answer after" in out
    return results


def is_served(folder: Path, question: str, number: signal.Signals, *words: str) -> str:
    """The answer of the run's latest checkpoint, served until it gets a signal."""
    cwd = folder.parent / "elsewhere"
    cwd.mkdir(exist_ok=True)
    words = ("serve", str(folder), "--port", "0", *words)
    with Run(cwd / "served", *words, cwd=cwd) as run:
        run.wait_for(lambda: "press Ctrl-C to stop the server" in run.out)
        [url] = re.findall(r"http://127.0.0.1:\d+/v1", run.out)
        [key] = re.findall(r"API key, for this server only: (\S+)", run.out)
        messages: list[Any] = [{"role": "user", "content": question}]
        with openai.OpenAI(base_url=url, api_key=key, timeout=60.0, max_retries=0) as client:
            [model] = client.models.list()
            done = client.chat.completions.create(model=model.id, messages=messages, temperature=0)
        with openai.OpenAI(base_url=url, api_key="x", timeout=60.0, max_retries=0) as stranger:
            try:
                stranger.models.list()
            except openai.AuthenticationError:
                pass
            else:
                raise AssertionError("a stranger was answered")
        run.send(number)
        assert run.end(60) == 0, run.out + run.err
        assert run.left_behind() == [] and run.out.endswith("stopped\n") and run.err == ""
        assert all(LOOPBACK.match(address) for address, _ in run.listening)
        return str(done.choices[0].message.content)
