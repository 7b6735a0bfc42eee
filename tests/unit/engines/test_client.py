"""The engine client against a stub: every way an answer can be wrong becomes an EngineError that
names the engine."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines import token_stream, weight_transaction
from hybridflow.engines.base import ENGINES, NO_EXTRAS, Engine, Extras, TokenRequests, WeightSpan
from hybridflow.engines.sglang.engine import EngineClient
from hybridflow.engines.spec import EngineSpec
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError, EngineSilent
from hybridflow.sync.session import Control, Outcome
from hybridflow.workers.requests import CUT_SHORT, EngineRequests
from tests.engine_weights import weights_checksum
from tests.unit.engines.stub import KEY, Stub, answer_of, streamed


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def opened() -> Iterator[Callable[..., EngineClient]]:
    clients: list[EngineClient] = []

    def open_client(*args: Any, **kwargs: Any) -> EngineClient:
        clients.append(EngineClient(*args, **kwargs))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture
def client(stub: Stub, opened: Callable[..., EngineClient]) -> EngineClient:
    return opened(stub.url, KEY, 60.0, name="engine-7")


def generate(client: EngineClient, count: int = 1) -> Any:
    return client.generate([[1, 2]] * count, SamplingConfig(), 4)


def test_answers_become_completions_in_order(stub: Stub, client: EngineClient) -> None:
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    stub.answers_with("/generate", [answer_of([5, 6], weight_versions=spans), answer_of([7])])
    first, second = generate(client, 2)
    assert first.token_ids.tolist() == [5, 6] and first.log_probs.tolist() == [-0.5, -0.5]
    assert first.finish_reason == "stop"
    assert first.weight_versions == (WeightSpan("2", 0, 1), WeightSpan("3", 1, 2))
    assert second.weight_versions == (WeightSpan("3", 0, 1),)
    _, body, authorization = stub.asked[0]
    assert (
        body["input_ids"] == [[1, 2], [1, 2]] and body["return_logprob"] is body["stream"] is True
    )
    assert authorization == f"Bearer {KEY}"


def test_cached_prompt_tokens_are_counted_once_a_request(stub: Stub, client: EngineClient) -> None:
    events = [
        answer_of([5], None, cached_tokens=1, number=0),
        answer_of([6], cached_tokens=1, number=0),
        answer_of([7], cached_tokens=0, number=1),
    ]
    assert client.tokens.take_prefix_hits() is None
    stub.answers_with("/generate", events)
    generate(client, 2)
    # one of the four tokens of both prompts
    assert client.tokens.take_prefix_hits() == 0.25
    assert client.tokens.take_prefix_hits() is None


def test_drafts_are_counted_once_a_request(stub: Stub, client: EngineClient) -> None:
    def counts(*passes: int) -> dict[str, Any]:
        """Drafts of three tokens: passes that accepted none, one, ... SGLang leaves out zeros at
        the end."""
        return {
            "spec_num_proposed_drafts": 3 * sum(passes),
            "spec_correct_drafts_histogram": [*passes],
        }

    events = [
        answer_of([5], None, number=0, **counts(1, 1, 1)),
        answer_of([6], number=0, **counts(1, 1, 1, 1)),
        answer_of([7], number=1),  # its only token came from the prompt's own pass
        answer_of([8], number=2, **counts(3, 1)),
    ]
    assert client.tokens.take_drafts() == {}
    stub.answers_with("/generate", events)
    generate(client, 3)
    assert client.tokens.take_drafts() == {
        "accepted_drafts": 7 / 24,
        "tokens_per_pass": 1 + 7 / 8,
        "accepted_drafts/depth_1": 4 / 8,
        "accepted_drafts/depth_2": 2 / 8,
        "accepted_drafts/depth_3": 1 / 8,
    }
    assert client.tokens.take_drafts() == {}


def test_drafts_of_one_token_have_no_depths(stub: Stub, client: EngineClient) -> None:
    drafts = {"spec_num_proposed_drafts": 4, "spec_correct_drafts_histogram": [4]}
    stub.answers_with("/generate", [answer_of([5], number=0, **drafts)])
    generate(client, 1)
    assert client.tokens.take_drafts() == {"accepted_drafts": 0.0, "tokens_per_pass": 1.0}


def test_what_tokens_were_sampled_among_comes_with_them(stub: Stub, client: EngineClient) -> None:
    """Over two events; an answer that was aborted before it ran has none."""
    first = answer_of(
        [5, 6], None, packed_support_sizes=int32(2, 1), packed_support_ids=int32(5, 9, 6)
    )
    last = answer_of([7], packed_support_sizes=int32(3), packed_support_ids=int32(1, 7, 2))

    def events(names: list[str]) -> Iterator[bytes]:
        for name, event in (
            (names[0], first),
            (names[1], answer_of([], "abort")),
            (names[0], last),
        ):
            event["meta_info"]["id"] = name
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    stub.answers_with("/generate", events)
    one, two = client.generate(
        [[1, 2]] * 2, SamplingConfig(top_k=3), 4, extras=Extras(support=True)
    )
    assert one.support is not None and two.support is not None
    assert (one.support.sizes.tolist(), one.support.ids.tolist()) == ([2, 1, 3], [5, 9, 6, 1, 7, 2])
    assert len(two.support) == 0 and two.finish_reason == "abort"
    assert stub.asked[0][1]["return_sampling_mask"] is True
    assert generate(client, 2)[0].support is None and "return_sampling_mask" not in stub.asked[1][1]


def test_supports_of_other_tokens_are_refused(stub: Stub, client: EngineClient) -> None:
    stub.answers_with(
        "/generate", [answer_of([5, 6], packed_support_sizes=int32(1), packed_support_ids=int32(5))]
    )
    with pytest.raises(EngineError, match="1 supports for 2 tokens"):
        client.generate([[1, 2]], SamplingConfig(top_k=3), 4, extras=Extras(support=True))


def test_an_answer_ends_before_a_token_whose_support_overflows(
    stub: Stub, client: EngineClient
) -> None:
    """SGLang aborts such a request; other errors of a request end them all."""
    overflow = {
        "type": "abort",
        "status_code": 400,
        "message": "Sampling support exceeds --sampling-mask-max-tokens=8",
    }
    answer = answer_of([5], overflow, packed_support_sizes=int32(2), packed_support_ids=int32(5, 6))
    stub.answers_with("/generate", [answer])
    [one] = client.generate([[1, 2]], SamplingConfig(top_k=3), 4, extras=Extras(support=True))
    assert one.token_ids.tolist() == [5] and one.finish_reason == "abort"
    stub.answers_with("/generate", [answer_of([5], {**overflow, "message": "out of memory"})])
    with pytest.raises(EngineError, match="failed: out of memory"):
        generate(client)


def int32(*values: int) -> str:
    return base64.b64encode(np.array(values, np.int32).tobytes()).decode()


def test_long_lists_are_cut_into_requests(stub: Stub, opened: Callable[..., EngineClient]) -> None:
    client = opened(stub.url, KEY, 60.0, batch_size=2)
    stub.answers_with("/generate", [answer_of([5]), answer_of([6])])
    assert [c.token_ids.tolist() for c in generate(client, 4)] == [[5], [6], [5], [6]]
    assert len(stub.asked) == 2


def test_no_prompts_is_no_request(stub: Stub, client: EngineClient) -> None:
    assert generate(client, 0) == [] and stub.asked == []


def test_empty_prompt_is_refused_before_the_engine_sees_it(
    stub: Stub, client: EngineClient
) -> None:
    with pytest.raises(EngineError, match="prompt 1 is empty"):
        client.generate([[1], []], SamplingConfig(), 4)
    assert stub.asked == []


def test_a_silent_engine_is_given_up(stub: Stub, opened: Callable[..., EngineClient]) -> None:
    client = opened(stub.url, KEY, 0.2, name="engine-7")
    stub.answers_with("/generate", [], delay_s=600.0)
    with pytest.raises(EngineError, match=r"engine engine-7: no data from /generate within"):
        generate(client)


def test_requests_that_nobody_waits_for_are_aborted(stub: Stub, client: EngineClient) -> None:
    stub.answers_with("/generate", [7])
    stub.answers_with("/abort_request", {})
    with pytest.raises(EngineError, match="malformed event"):
        generate(client, 2)
    [names] = [body["rid"] for path, body, _ in stub.asked if path == "/generate"]
    assert len(set(names)) == 2
    deadline = time.monotonic() + 60
    # the client does not wait long for these answers
    while len(stub.asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [body["rid"] for path, body, _ in stub.asked if path == "/abort_request"] == names


def aborts(stub: Stub, count: int) -> list[str]:
    """The requests that the engine was told to abort, once there are so many."""
    deadline = time.monotonic() + 60
    while True:
        names = [body["rid"] for path, body, _ in list(stub.asked) if path == "/abort_request"]
        if len(names) >= count:
            return names
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_of_the_requests_is_aborted_and_the_others_go_on(
    stub: Stub, client: EngineClient
) -> None:
    def answers(names: list[str]) -> Iterator[bytes]:
        begun = [answer_of([5 + number], None, number=number) for number in range(12)]
        yield streamed(begun, names, is_end=False)
        number = names.index(aborts(stub, 1)[0])
        # the server repeats the last token
        rest = [answer_of([5 + number], "abort", [], number=number)]
        yield streamed(
            rest + [answer_of([9], number=other) for other in range(12) if other != number], names
        )

    stub.answers_with("/generate", answers)
    stub.answers_with("/abort_request", {})
    found: dict[int, Any] = {}
    asked = Asked([[1]] * 12, [{}] * 12, NO_EXTRAS, found.__setitem__)
    client.tokens.ask(asked)
    deadline = time.monotonic() + 60
    while not len(asked.answers[11]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    asked.abort([1])
    asked.done.result(60.0)
    assert aborts(stub, 1) == [asked.names[1]]
    assert (found[1].token_ids.tolist(), found[1].finish_reason) == ([6], "abort")
    assert {found[n].finish_reason for n in range(12) if n != 1} == {"stop"}
    # SGLang takes a name for the beginning of names
    assert not any(
        one.startswith(other) for one in asked.names for other in asked.names if one is not other
    )


def test_what_has_come_so_far_can_be_looked_at_while_requests_go_on(
    stub: Stub, client: EngineClient
) -> None:
    going_on = threading.Event()

    def answers(names: list[str]) -> Iterator[bytes]:
        yield streamed(
            [answer_of([5], None, number=0), answer_of([6, 7], "stop", number=1)],
            names,
            is_end=False,
        )
        assert going_on.wait(60.0)
        yield streamed([answer_of([8], "length", number=0), answer_of([9], number=2)], names)

    stub.answers_with("/generate", answers)
    requests = EngineRequests()
    engine = cast(Engine, client)
    requests.ask(
        engine, 0, [40, 41, 42], TokenRequests([[1], [2], [3]], SamplingConfig(), [4] * 3, [])
    )
    deadline = time.monotonic() + 60
    while len(now := requests.so_far(NO_EXTRAS)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    found = {
        one.ticket: (list(one.completion.token_ids), one.completion.finish_reason) for one in now
    }
    assert found == {40: ([5], CUT_SHORT), 41: ([6, 7], "stop")}
    assert requests.so_far(Extras(routes=True)) == []
    going_on.set()
    while requests.failed() is None and requests._parts:
        assert time.monotonic() < deadline
        requests.wait(0.01)
    whole = {
        one.ticket: (list(one.completion.token_ids), one.completion.finish_reason)
        for one in requests.take(NO_EXTRAS)
    }
    assert whole == {40: ([5, 8], "length"), 41: ([6, 7], "stop"), 42: ([9], "stop")}


def test_a_request_that_the_server_did_not_know_yet_is_aborted_again(
    stub: Stub, client: EngineClient
) -> None:
    def answers(names: list[str]) -> Iterator[bytes]:
        aborts(stub, 1)
        yield streamed([answer_of([5], number=0)], names, is_end=False)
        assert aborts(stub, 2) == [names[1]] * 2
        yield streamed([answer_of([], "abort", [], number=1)], names)

    stub.answers_with("/generate", answers)
    stub.answers_with("/abort_request", {})
    found: dict[int, Any] = {}
    asked = Asked([[1], [2]], [{}] * 2, NO_EXTRAS, found.__setitem__)
    client.tokens.ask(asked)
    asked.abort([1])
    asked.done.result(60.0)
    assert [found[number].finish_reason for number in (0, 1)] == ["stop", "abort"]


def test_no_listener(stub: Stub, opened: Callable[..., EngineClient]) -> None:
    stub.server_close()
    with pytest.raises(EngineError, match=r"engine-7.*no connection"):
        generate(opened(stub.url, KEY, 60.0, name="engine-7"))


def test_answers_come_in_parts_and_in_any_order(stub: Stub, client: EngineClient) -> None:
    spans = [{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 3}]
    events = [
        answer_of([5], None, number=0),
        answer_of([8], None, number=1, weight_version="2"),
        answer_of([9], "length", [-2.0], number=1),
        answer_of([6], None, [-1.5], number=0),
        answer_of([7], "stop", [-0.25], number=0, weight_versions=spans),
    ]
    stub.answers_with("/generate", events)
    first, second = generate(client, 2)
    assert first.token_ids.tolist() == [5, 6, 7] and first.log_probs.tolist() == [-0.5, -1.5, -0.25]
    assert first.weight_versions == (WeightSpan("2", 0, 2), WeightSpan("3", 2, 3))
    assert second.token_ids.tolist() == [8, 9] and second.finish_reason == "length"


def test_an_aborted_request_keeps_what_came_of_it(stub: Stub, client: EngineClient) -> None:
    # the server repeats the last token of a request that waited
    repeated = answer_of([6], "abort", [], number=0)
    stub.answers_with("/generate", [answer_of([5, 6], None, number=0), repeated])
    [answer] = generate(client)
    assert (answer.token_ids.tolist(), answer.finish_reason) == ([5, 6], "abort")


def test_an_event_of_any_request_shows_that_the_engine_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silence is the engine's, not one request's. The clock goes on by what the loop would
    sleep."""
    # a library may have made another kind the default
    loop = asyncio.SelectorEventLoop()
    now = [0.0]
    select = loop._selector.select  # type: ignore[attr-defined]

    def sleep(timeout: float | None) -> Any:
        now[0] += timeout or 0.0
        return select(0)

    monkeypatch.setattr(loop, "time", lambda: now[0])
    monkeypatch.setattr(loop._selector, "select", sleep)  # type: ignore[attr-defined]
    monkeypatch.setattr(token_stream, "time", SimpleNamespace(monotonic=loop.time))

    async def heard() -> str:
        streams = TokenStreams("", {}, "engine-7", 0.4, 8)
        slow = asyncio.get_running_loop().create_future()

        async def others() -> None:
            for _ in range(6):
                await streams._heard_within(asyncio.sleep(0.1), loop.time())
            slow.set_result("late")

        _, found = await asyncio.gather(others(), streams._heard_within(slow, loop.time()))
        return str(found)

    assert loop.run_until_complete(heard()) == "late" and now[0] > 0.5
    loop.close()


def test_thousands_of_requests_share_a_thread(
    stub: Stub, opened: Callable[..., EngineClient]
) -> None:
    client = opened(stub.url, KEY, 60.0, name="alone", batch_size=512)
    stub.answers_with("/generate", [answer_of([number]) for number in range(512)])
    asked = [Asked([[1]] * 512, [{}] * 512, NO_EXTRAS, lambda *_: None) for _ in range(8)]
    for one in asked:
        client.tokens.ask(one)
    mine = [thread for thread in threading.enumerate() if thread.name == "tokens-alone"]
    for one in asked:
        one.done.result(120.0)
    assert len(mine) == 1
    assert all(len(answer) == 1 for one in asked for answer in one.answers)
    client.close()
    assert not mine[0].is_alive()


def test_closing_gives_requests_up(stub: Stub, opened: Callable[..., EngineClient]) -> None:
    client = opened(stub.url, KEY, 60.0, name="engine-7")
    stub.answers_with("/generate", [], delay_s=600.0)
    stub.answers_with("/abort_request", {})
    asked = Asked([[1]], [{}], NO_EXTRAS, lambda *_: None)
    client.tokens.ask(asked)
    client.close()
    with pytest.raises(EngineError, match="were aborted"):
        asked.done.result(60.0)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"error": {"message": "too long"}}, 400, "returned status 400.*too long"),
        (b"Internal Server Error", 500, "returned status 500.*Internal"),
        (b"<html>\n\n", 200, "invalid JSON"),
        (b"<html>", 200, "closed before the response ended"),
        ([{"error": {"message": "too long"}}], 200, "failed.*too long"),
        (
            [answer_of([], {"type": "abort", "status_code": 400, "message": "too long"})],
            200,
            "failed.*too long",
        ),
        ([], 200, "ended before 1 prompts were answered"),
        ([answer_of([5], None)], 200, "ended before 1 prompts were answered"),
        ([7], 200, "malformed event"),
        ([{"output_ids": [1]}], 200, "malformed event.*meta_info"),
        ([answer_of([1], log_probs=[])], 200, "got 0 log-probs for 1 tokens"),
        ([answer_of([1], packed_log_probs=None)], 200, "malformed event"),
        ([answer_of([1], finish_reason={"type": "mood"})], 200, "finish reason 'mood'"),
        ([answer_of([1], finish_reason=[])], 200, "malformed event"),
        ([answer_of([1], number=1)], 200, "malformed event.*nobody"),
    ],
)
def test_bad_answers_to_generate(
    stub: Stub, client: EngineClient, body: Any, status: int, message: str
) -> None:
    stub.answers_with("/generate", body, status)
    with pytest.raises(EngineError, match=f"engine engine-7: .*{message}"):
        generate(client)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"success": False, "message": "no session"}, 400, "returned status 400.*no session"),
        ({"success": False, "message": "no session"}, 200, "failed: no session"),
        ([1], 200, "expected a JSON object, got list"),
        (b"", 200, "invalid JSON"),
    ],
)
def test_refused_control_calls(
    stub: Stub, client: EngineClient, body: Any, status: int, message: str
) -> None:
    stub.answers_with("/begin_weight_update", body, status)
    with pytest.raises(EngineError, match=f"engine engine-7: /begin_weight_update .*{message}"):
        client.begin_weight_update()


def test_weight_calls_say_what_sglang_expects(stub: Stub, client: EngineClient) -> None:
    for path in (
        "pause_generation",
        "update_weights_from_tensor",
        "update_weight_version",
        "weights_checker",
    ):
        stub.answers_with(
            f"/{path}", {"success": True, "message": "", "per_engine_checksum": "abc"}
        )
    client.pause("retract")
    control = Control("describe", "127.0.0.1", 9, 2.5, "described", 0, 2)
    client.call_ranks(control, flush_cache=False)
    client.set_weight_version(4)
    assert weights_checksum(client) == "abc"
    bodies = {path: body for path, body, _ in stub.asked}
    update = bodies["/update_weights_from_tensor"]
    # above all no weight_version
    assert update.keys() == {"serialized_named_tensors", "load_format", "flush_cache"}
    assert (
        update["load_format"] == "hybridflow.engines.sglang.weight_receiver.load"
        and update["flush_cache"] is False
    )
    assert len(update["serialized_named_tensors"]) == 2  # one a rank
    for packed in update["serialized_named_tensors"]:
        ((name, tensor),) = pickle.loads(base64.b64decode(packed))
        assert Control.from_json(name) == control and tensor.numel() == 1
    assert bodies["/update_weight_version"] == {"new_version": "4", "abort_all_requests": False}


def test_another_deadline_for_the_same_engine(stub: Stub, client: EngineClient) -> None:
    stub.answers_with("/begin_weight_update", {"success": True}, delay_s=600.0)
    with pytest.raises(
        EngineSilent, match=r"engine engine-7: no response from /begin_weight_update within 0\.2 s"
    ):
        client.with_timeout(0.2).begin_weight_update()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_time_of_a_sync_is_not_counted_as_silence(
    kind: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = ENGINES.get(kind)(
        EngineSpec("engine-0", str(tmp_path)), tmp_path / "engine.log", lambda: None
    )
    events: list[str] = []

    def receive(*_: Any) -> Outcome:
        events.append("receive")
        if fails:
            raise EngineError("lost", engine="engine-0")
        return Outcome("engine-0", 1, "refused")

    monkeypatch.setattr(weight_transaction, "receive", receive)
    monkeypatch.setattr(engine.client.tokens, "heard", lambda: events.append("heard"))
    endpoint = SimpleNamespace(timeout_s=5.0)
    with pytest.raises(EngineError) if fails else nullcontext():
        engine.receive(SimpleNamespace(endpoint=endpoint, version=2), "plan")
    assert events == ["receive", "heard"]
