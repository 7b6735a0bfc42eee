"""vLLM's kind of engine without vLLM: its contract against answers that were recorded from a real
server, what it refuses, and a rank that takes whole tensors."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import ENGINES, Completion, TokenRequests
from hybridflow.engines.spec import EngineSpec
from hybridflow.engines.vllm import door
from hybridflow.engines.vllm.client import VllmClient
from hybridflow.engines.vllm.engine import VllmEngine
from hybridflow.engines.vllm.server import check_python, check_spec, environment, server_arguments
from hybridflow.engines.vllm.worker import (
    WeightExtension,
    computes_with_what_was_loaded,
    receiver_of,
)
from hybridflow.engines.weight_receiver import WeightReceiver
from hybridflow.errors import EngineError, EngineSilent
from hybridflow.sync import session
from hybridflow.sync.session import DESCRIBE, Control
from tests.unit.engines.bench import FAMILY, HOST, WAIT_S, Bench, Engine

RECORDED = json.loads((Path(__file__).parent / "vllm_answers.json").read_text(encoding="utf-8"))[
    "answers"
]
GREEDY = SamplingConfig(temperature=0.0)
GENERATE = "/inference/v1/generate"
KEY = "key of the fake"


class Fake(ThreadingHTTPServer):
    """Replays what a real server answered: control calls by their path, prompts as `says` names
    them in turn."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Replay)
        self.says: list[str] = []
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.hangs = threading.Event()  # set: a prompt is answered with its first event alone
        self.closing = threading.Event()
        self.controls = {one["path"]: one for one in RECORDED.values() if one["status"] == 200}


class Replay(BaseHTTPRequestHandler):
    server: Fake

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, body, self.headers["Authorization"]))
        if self.path == "/inference/v1/abort_requests":
            recorded = {"status": 200, "body": ""}
        else:
            recorded = (
                RECORDED[server.says.pop(0)]
                if self.path == GENERATE
                else server.controls[self.path]
            )
        text = recorded["body"].replace("NAME", body.get("request_id", ""))
        if server.hangs.is_set() and self.path == GENERATE:
            text = text.split("\n\n")[0] + "\n\n"
        self.send_response(recorded["status"])
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()
        if server.hangs.is_set() and self.path == GENERATE:
            server.closing.wait(30.0)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def fake() -> Iterator[Fake]:
    built = Fake()
    threading.Thread(target=built.serve_forever, daemon=True).start()
    yield built
    built.closing.set()
    built.shutdown()
    built.server_close()


@pytest.fixture
def client(fake: Fake) -> Iterator[VllmClient]:
    built = VllmClient(f"http://127.0.0.1:{fake.server_port}", KEY, 20.0, name="engine-0")
    yield built
    built.close()


# ---- tokens


def test_answers_come_in_order_with_log_probs_and_versions(fake: Fake, client: VllmClient) -> None:
    fake.says = ["stop"]
    [stopped] = client.generate([[3, 1, 4]], GREEDY, 4, [7])
    fake.says = ["length"]
    [whole] = client.generate([[3, 1, 4]], GREEDY, 70)
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", 2) and stopped.token_ids[
        -1
    ] == 7
    assert (whole.finish_reason, len(whole.token_ids), len(whole.log_probs)) == ("length", 70, 70)
    assert whole.token_ids[:2].tolist() == stopped.token_ids.tolist()
    assert whole.log_probs[0] == pytest.approx(-2.129054, abs=1e-6)
    assert [(span.version, span.start, span.end) for span in whole.weight_versions] == [
        ("default", 0, 70)
    ]
    path, body, key = fake.asked[0]
    assert (path, body["token_ids"], key) == (GENERATE, [3, 1, 4], f"Bearer {KEY}")
    assert body["sampling_params"] == {
        "temperature": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 4,
        "logprobs": 0,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "detokenize": False,
    }


def test_an_aborted_answer_keeps_what_had_come_and_the_server_is_told_its_name(
    fake: Fake, client: VllmClient
) -> None:
    told = dict[int, Completion]()
    fake.says = ["abort"]
    asked = client.ask(TokenRequests([[3, 1, 4]], GREEDY, [450], []), told.__setitem__)
    asked.done.result(20.0)
    assert told[0].finish_reason == "abort" and 0 < len(told[0].token_ids) < 450
    asked.abort([0])
    name = fake.asked[0][1]["request_id"]
    assert fake.asked[-1][:2] == (
        "/inference/v1/abort_requests",
        {"request_ids": [f"generate-tokens-{name}"]},
    )


def test_a_refusal_is_told_in_the_servers_words(fake: Fake, client: VllmClient) -> None:
    fake.says = ["refused"]
    with pytest.raises(
        EngineError, match=r"engine-0: /inference/v1/generate failed: .*longer than the maximum"
    ):
        client.generate([[1] * 600], GREEDY, 4)


def test_one_that_falls_silent_is_told_with_what_has_come(fake: Fake) -> None:
    fake.says = ["length"]
    fake.hangs.set()
    client = VllmClient(f"http://127.0.0.1:{fake.server_port}", KEY, 1.0, name="engine-0")
    client.tokens.version = "5"
    with pytest.raises(
        EngineSilent, match="no data from /inference/v1/generate within 1 s"
    ) as caught:
        client.generate([[3, 1, 4]], GREEDY, 70)
    [begun] = caught.value.begun
    assert (begun.finish_reason, begun.token_ids.tolist()) == ("abort", [3])  # type: ignore[union-attr]
    assert [vars(span) for span in begun.weight_versions] == [
        {"version": "5", "start": 0, "end": 1}
    ]
    client.close()


@pytest.mark.parametrize("sampling", [SamplingConfig(top_p=0.5), SamplingConfig(0.7, 1.0, 4)])
def test_log_probs_of_a_cut_distribution_are_not_taken_for_the_policys(
    client: VllmClient, sampling: SamplingConfig
) -> None:
    with pytest.raises(EngineError, match=r"set top_p=1 and top_k=-1 in rollout\.sampling"):
        client.generate([[1]], sampling, 4)


# ---- control


def test_a_sync_pauses_calls_the_ranks_forgets_the_cache_and_resumes(
    fake: Fake, client: VllmClient
) -> None:
    client.pause("retract")
    client.call_ranks(Control(DESCRIBE, HOST, 1, 1.0, "described", 0, 1))
    client.set_weight_version(7)
    client.resume()
    client.release_memory()
    client.resume_memory(["weights"])
    paths = [path for path, _, _ in fake.asked]
    assert paths == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/resume",
        "/sleep?level=2",
        "/wake_up?tags=weights",
    ]
    assert fake.asked[1][1]["method"] == "take_weight_message" and hasattr(
        WeightExtension, "take_weight_message"
    )
    assert Control.from_json(fake.asked[1][1]["args"][0]).action == DESCRIBE


def test_the_cache_in_use_and_a_broken_rank_are_errors(fake: Fake, client: VllmClient) -> None:
    control = Control(DESCRIBE, HOST, 1, 1.0, "described", 0, 1)
    fake.controls["/reset_prefix_cache?reset_running_requests=true"] = {
        "status": 200,
        "body": '{"success":false}',
    }
    with pytest.raises(EngineError, match="the KV cache of the old weights is still in use"):
        client.call_ranks(control)
    fake.controls["/collective_rpc"] = RECORDED["broken_rank"]
    with pytest.raises(
        EngineError, match=r"/collective_rpc returned status 500: .*has no attribute"
    ):
        client.call_ranks(control)


# ---- start


def spec(folder: Path, **changes: Any) -> EngineSpec:
    sizes = {"vocab_size": 96, "max_position_embeddings": 4096, **changes.pop("config", {})}
    (folder / "config.json").write_text(json.dumps(sizes))
    return EngineSpec(name="engine-0", model_path=str(folder), max_total_tokens=1000, **changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pipeline": 2}, "rollout.pipeline=2"),
        ({"nnodes": 2}, "rollout.nodes_per_engine=2"),
        ({"expert": 2, "tensor": 2}, "rollout.expert=2"),
        ({"data_attention": 2, "tensor": 2}, "rollout.data_parallel_attention=2"),
        ({"return_routed_experts": True}, "actor.router_replay"),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, "rollout.quantization=null"),
    ],
)
def test_what_it_cannot_do_is_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(EngineError, match=key):
        check_spec(spec(tmp_path, **changes))


def test_an_interpreter_without_vllm_is_refused_at_the_start(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    engine = ENGINES.get("vllm")(
        spec(tmp_path, python=str(bare)), tmp_path / "engine.log", lambda: None
    )
    with pytest.raises(
        EngineError, match=r"vllm, torch.* not found in rollout\.python=.*set rollout\.python"
    ):
        engine.start()
    with pytest.raises(EngineError, match=r"could not run rollout\.python=/nowhere"):
        check_python(spec(tmp_path, python="/nowhere"))


def test_the_server_is_given_what_the_spec_says_and_no_key_on_its_command_line(
    tmp_path: Path,
) -> None:
    said = spec(tmp_path, extra_args={"max_num_batched_tokens": 512}, cache_prefixes=False)
    arguments = server_arguments(said, 20000)
    assert (arguments["max-model-len"], arguments["num-gpu-blocks-override"]) == (1024, 33)
    assert arguments["load-format"] == "dummy" and arguments["max-num-batched-tokens"] == 512
    assert arguments["no-enable-prefix-caching"] is True and KEY not in str(arguments)
    assert "num-gpu-blocks-override" not in server_arguments(spec(tmp_path, device="cuda"), 20000)
    assert environment(said, "/folder", KEY)[door.KEY] == KEY


def test_a_token_that_the_model_lacks_never_reaches_the_server(tmp_path: Path) -> None:
    engine = VllmEngine(spec(tmp_path), tmp_path / "engine.log")
    with pytest.raises(
        EngineError, match="prompt 1 contains token 96, but the model's token ids are 0 to 95"
    ):
        engine.generate([[1], [2, 96]], GREEDY, 4)


@pytest.mark.parametrize(
    ("shown", "status"), [(f"Bearer {KEY}", 200), ("Bearer other", 401), ("", 401)]
)
def test_the_door_opens_with_the_key_alone(
    monkeypatch: pytest.MonkeyPatch, shown: str, status: int
) -> None:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    monkeypatch.setenv(door.KEY, KEY)
    guarded = door.Door(app)
    headers = [(b"authorization", shown.encode())]
    asyncio.run(
        guarded({"type": "http", "path": "/collective_rpc", "headers": headers}, None, send)
    )
    assert sent[0]["status"] == status
    sent.clear()
    asyncio.run(guarded({"type": "websocket", "path": "/", "headers": headers}, None, send))
    assert sent == []


# ---- ranks


class Worker(WeightExtension):
    """A vLLM worker with the small engine of the bench, which packs its weights away after a
    load."""

    def __init__(self) -> None:
        self.rank = 0
        self.model = Engine()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.loads = 0

    def reload_weights(self, weights_iterator: Any, is_checkpoint_format: bool) -> None:
        assert is_checkpoint_format
        self.model.load_weights(weights_iterator)
        self.loads += 1


class WholeBench(Bench):
    """The bench with a rank of vLLM in place of SGLang's."""

    def plan(self) -> Any:
        self.worker = Worker()
        self.engine = self.worker.model
        self.receiver = receiver_of(self.worker)
        return super().plan()


@pytest.fixture
def bench() -> Iterator[WholeBench]:
    built = WholeBench()
    yield built
    for sender in built.senders:
        sender.close()


def test_whole_tensors_arrive_again_and_again_and_vllm_loads_them(bench: WholeBench) -> None:
    nbytes = sum(4 * torch.Size(shape).numel() for shape in FAMILY.tensors().values())
    for seed in (1, 2):
        whole = bench.train(seed)
        report, outcomes, _ = bench.sync()
        assert (report.error, report.nbytes, bench.worker.loads) == ("", nbytes, seed)
        assert {one.status for one in outcomes} == {"served"} and bench.holds(whole)


def test_what_was_called_off_is_never_loaded(bench: WholeBench) -> None:
    bench.train(1)
    report, _, _ = bench.sync(call_off="the driver has given up")
    assert report.error and bench.worker.loads == 0


def test_a_message_that_cannot_be_read_ends_no_rank(bench: WholeBench) -> None:
    bench.worker.take_weight_message("no json")
    bench.worker.take_weight_message(
        Control(DESCRIBE, HOST, bench.store.port, WAIT_S, "again", 0, 1).to_json()
    )
    assert session.read_reports(bench.store, "again", [0], WAIT_S)[0].error == ""


def test_slices_go_where_every_layer_computes_with_what_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def method(name: str) -> Any:
        return type(name, (), {})()

    linear = torch.nn.Linear(2, 2, device="meta")  # stands for a GPU: anything but a CPU
    model = torch.nn.Sequential(linear)
    linear.quant_method = method("UnquantizedLinearMethod")
    assert computes_with_what_was_loaded(model)
    worker = SimpleNamespace(rank=0, model_runner=SimpleNamespace(get_model=lambda: model))
    assert type(receiver_of(worker)) is WeightReceiver
    linear.quant_method = method("UnquantizedFusedMoEMethod")
    assert not computes_with_what_was_loaded(model)
    linear.quant_method = method("UnquantizedLinearMethod")
    model.append(
        type(
            "MLAAttention", (torch.nn.Module,), {"process_weights_after_loading": lambda self: None}
        )()
    )
    assert not computes_with_what_was_loaded(model)
    assert not computes_with_what_was_loaded(torch.nn.Linear(2, 2))
