"""The judge behind an OpenAI-compatible server, with a server of the test's on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards import RewardManager
from hybridflow.rewards.verifiers.base import ScoreResult
from hybridflow.single_controller import block_on

Request = dict[str, Any]


class Server:
    """Answers chat completions with what `answer` returns for the text of the request's message:
    the judge's words, an HTTP status, or None to say nothing until the end."""

    def __init__(self) -> None:
        self.answer: Callable[[str], str | int | None] = lambda text: "Score: 10"
        self.requests: list[Request] = []
        self.keys: list[str] = []
        self.over = threading.Event()
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner.requests.append(request)
                    owner.keys.append(self.headers["Authorization"])
                said = owner.answer(request["messages"][0]["content"])
                if said is None:
                    owner.over.wait(60)
                    said = 500
                message = {"role": "assistant", "content": said}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                whole = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                }
                body = json.dumps(
                    whole if isinstance(said, str) else {"error": {"message": owner.keys[-1]}}
                ).encode()
                self.send_response(200 if isinstance(said, str) else said)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.over.set()
    started.server.shutdown()
    started.server.server_close()


def settings(server: Server, **more: Any) -> dict[str, Any]:
    kwargs = {"judge_url": server.url, "judge_model": "grader"} | more.pop("kwargs", {})
    return {"combine": {"judge": 1.0}, "kwargs": kwargs, "processes": 1, "timeout_s": 60.0} | more


def graded(given: dict[str, Any], texts: list[str], prompt: str = "2+2=") -> list[ScoreResult]:
    with RewardManager(RewardConfig(**given)) as manager:
        manager.check_data_sources(["any"])
        assert manager.reads_prompt
        infos = [{"prompt": prompt}] * len(texts)
        return manager.score(["any"] * len(texts), texts, ["4"] * len(texts), infos)


def test_the_judge_sees_prompt_reference_and_response_and_its_grade_is_the_score(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is for the addresses of other machines
    """Fields in the texts are text."""
    server.answer = lambda text: f"Score: 1? It says 4. Score: {7.5 if 'it is 4' in text else 0}"
    request = {"max_tokens": 99, "chat_template_kwargs": {"thinking": False}}
    found = graded(
        settings(server, kwargs={"judge_request": request}),
        ["it is 4", "{ground_truth} {x"],
        "What is {response}?",
    )
    assert [result.score for result in found] == [0.75, 0.0]
    assert found[0].extra == {"judge_said": "Score: 1? It says 4. Score: 7.5", "judge": 0.75}
    texts = [request["messages"][0]["content"] for request in server.requests]
    assert (
        sum("it is 4" in text for text in texts)
        == sum("{ground_truth} {x" in text for text in texts)
        == 1
    )
    assert all("[Question]\nWhat is {response}?\n" in text for text in texts)
    assert all("[Reference answer]\n4\n" in text for text in texts)
    sent = server.requests[0]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("grader", 0.0, 99)
    assert sent["chat_template_kwargs"] == {"thinking": False}


@pytest.mark.slow
def test_many_rows_are_graded_at_once(server: Server) -> None:
    """No answer comes before 16 requests are there."""
    together = threading.Barrier(16)

    def answer(text: str) -> str:
        together.wait(60)
        return "Score: 10"

    server.answer = answer
    assert [result.score for result in graded(settings(server), ["x"] * 32)] == [1.0] * 32


@pytest.mark.slow
def test_a_server_that_is_busy_is_asked_again(server: Server) -> None:
    statuses = [503, 429]
    server.answer = lambda text: statuses.pop() if statuses else "Score: 5"
    assert graded(settings(server), ["x"])[0].score == 0.5
    assert len(server.requests) == 3


@pytest.mark.slow
def test_rows_whose_judge_says_nonsense_or_nothing_cost_themselves_alone(server: Server) -> None:
    said = {"none": "I like it", "much": "Score: 11", "less": "Score: -1", "right": "Score: 10"}
    server.answer = lambda text: said[text.rpartition("the student]\n")[2].split("\n")[0]]
    found = graded(settings(server), list(said))
    assert [result.score for result in found] == [0, 0, 0, 1]
    failures = [result.failure or "" for result in found]
    assert (
        "the judge's answer contains no grade (reward.kwargs.judge_score): 'I like it'"
        in failures[0]
    )
    assert "grade 11 is not between 0 and 10" in failures[1] and "grade -1 is not" in failures[2]
    assert found[3].failure is None


@pytest.mark.slow
def test_a_judge_that_says_nothing_is_given_up_at_the_deadline(server: Server) -> None:
    server.answer = lambda text: None
    with RewardManager(RewardConfig(**settings(server, timeout_s=1.0))) as manager:
        [[found]] = block_on(
            manager.collect([manager.submit(["any"], ["x"], ["4"], [{"prompt": "2+2="}])])
        )
    assert (found.score, found.failure) == (0.0, "no score within 1 s (reward.timeout_s)")


@pytest.mark.slow
def test_the_key_is_read_from_the_environment_and_recorded_nowhere(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "open sesame")
    given = settings(server, kwargs={"judge_key_variable": "JUDGE_KEY"})
    found = graded(given, ["x"])
    assert server.keys == ["Bearer open sesame"] and "sesame" not in repr(found)
    server.answer = lambda text: (
        "Score: 10" if "right" in text.rpartition("the student]")[2] else 401
    )
    found = graded(given, ["right", "x"])
    assert "AuthenticationError" in str(found[1].failure) and "Bearer ***" in str(found[1].failure)
    assert "sesame" not in repr(found)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(
        DataError,
        match=r"environment variable JUDGE_KEY \(reward.kwargs.judge_key_variable\) is not",
    ):
        graded(given, ["x"])


def test_other_verifiers_may_judge_beside_it(server: Server) -> None:
    server.answer = lambda text: "Score: 5"
    found = graded(settings(server, combine={"judge": 1.0, "exact": 2.0}), ["4", "5"])
    assert [result.score for result in found] == [2.5, 0.5]
    assert [(result.extra["judge"], result.extra["exact"]) for result in found] == [
        (0.5, 1.0),
        (0.5, 0.0),
    ]


def test_a_server_and_a_model_are_needed() -> None:
    with pytest.raises(
        ConfigError, match=r"requires reward.kwargs.judge_model, reward.kwargs.judge_url"
    ):
        RewardManager(RewardConfig(combine={"judge": 1.0}))


@pytest.mark.slow
def test_a_verifier_of_ones_own_may_read_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from hybridflow.rewards.verifiers.base import verifier\n\n\n"
        "@verifier('echo', data_sources=['echo'])\n"
        "def echo(response, ground_truth, *, prompt):\n"
        "    return float(prompt.startswith('2'))\n"
    )
    with RewardManager(
        RewardConfig(verifiers=(f"{tmp_path / 'own.py'}:echo",), processes=1)
    ) as manager:
        assert manager.reads_prompt
        found = manager.score(
            ["echo"] * 2, ["a", "b"], [None] * 2, [{"prompt": "2+2="}, {"prompt": "x"}]
        )
    assert [result.score for result in found] == [1.0, 0.0]
