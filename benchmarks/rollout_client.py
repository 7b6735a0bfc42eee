"""The answers of an engine in the process that asked for them: 512 prompts of 2,048 tokens each through a stub engine,
seconds and peak of memory, and 4,096 prompts in as many requests at once.

The peer is one JSON answer for all prompts, read with requests and json: what this client did before it streamed. Each
side runs in a process of its own per round, so that the peak of memory is its own.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.engines.sglang.client import EngineClient
from support.report import Figure, faster, median, write

PROMPTS, TOKENS, ROUNDS, TOGETHER = 512, 2048, 5, 4096
PEER = "one JSON answer"
STUB = Path(__file__).parent / "support" / "engine_stub.py"


def one_json_answer(url: str, prompts: list[list[int]]) -> list[Completion]:
    """All prompts in one request whose answer comes whole."""
    body = {"rid": [str(number) for number in range(len(prompts))], "input_ids": prompts, "return_logprob": True}
    found = []
    for item in requests.Session().post(f"{url}/generate", json=body, timeout=300).json():
        meta = item["meta_info"]
        tokens = [int(token) for token in item["output_ids"]]
        log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        span = (WeightSpan(meta["weight_version"], 0, len(tokens)),)
        found.append(Completion(tokens, log_probs, meta["finish_reason"]["type"], span))
    return found


def streamed(url: str, prompts: list[list[int]], batch_size: int = 1024) -> list[Completion]:
    """Through the client of the engine."""
    client = EngineClient(url, "none", 300.0, batch_size=batch_size)
    try:
        return client.generate(prompts, SamplingConfig(), TOKENS)
    finally:
        client.close()


def side(name: str, url: str) -> None:
    """One measurement in this process: prints seconds and bytes."""
    prompts = [[1] * 64 for _ in range(PROMPTS)]
    ask = {"ours": streamed, "peer": one_json_answer}[name]
    ask(url, prompts[:1])
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = ask(url, prompts)
    seconds = time.perf_counter() - started
    assert len(found) == PROMPTS and all(len(one.token_ids) == len(one.log_probs) == TOKENS for one in found)
    print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def measured(name: str, url: str) -> tuple[float, float]:
    """Seconds and bytes of a side, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, name, url], check=True, capture_output=True, text=True)
    seconds, nbytes = done.stdout.split()
    return float(seconds), float(nbytes)


def serving(length: int) -> tuple[subprocess.Popen[bytes], str]:
    """A stub engine and its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(STUB), str(length), str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the stub does not answer")


def main() -> None:
    """Measure both sides in turn, then many requests at once."""
    process, url = serving(TOKENS)
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    try:
        for turn in range(ROUNDS):
            for name in sorted(found, reverse=bool(turn % 2)):
                found[name].append(measured(name, url))
    finally:
        process.terminate()
        process.wait()
    figures = []
    for number, (metric, unit) in enumerate((("seconds", "s"), ("peak of memory", "bytes"))):
        ours, theirs = (median([one[number] for one in found[name]]) for name in ("ours", "peer"))
        figures.append(faster(f"{metric}, {PROMPTS} prompts of {TOKENS:,} tokens", ours, theirs, PEER, unit))
    process, url = serving(16)
    try:
        started = time.perf_counter()
        answers: Any = streamed(url, [[1] * 16] * TOGETHER, batch_size=1)
        figures.append(Figure(f"{TOGETHER} HTTP requests at once", time.perf_counter() - started, "s"))
        assert all(len(one.token_ids) == 16 for one in answers) and len(answers) == TOGETHER
    finally:
        process.terminate()
        process.wait()
    write("rollout_client", figures, {"rounds": ROUNDS, "statistic": "median", "memory": "growth of the peak RSS"})


if __name__ == "__main__":
    side(*sys.argv[1:]) if len(sys.argv) == 3 else main()
