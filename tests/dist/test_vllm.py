"""A real vLLM server: log-probs against transformers, whole weights again and again, its door and
its end.

vLLM is in no lock of ours: HYBRIDFLOW_VLLM_PYTHON names an interpreter that has vLLM and xxhash,
and without it these tests are left out. `tests/unit/engines/test_vllm.py` has the contract against
answers recorded here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines import guard
from hybridflow.engines.base import Asking, Completion, TokenRequests
from hybridflow.errors import EngineError
from tests.dist.harness.rounding import FACTOR
from tests.dist.harness.sync_world import SyncWorld
from tests.models import DENSE_UNTIED

PYTHON = os.environ.get("HYBRIDFLOW_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="HYBRIDFLOW_VLLM_PYTHON names no interpreter that has vLLM"
    ),
]
# vLLM's attention on CPUs takes no narrower heads
MODEL = {**DENSE_UNTIED, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 1024}
PROMPTS = [[7], [3, 1, 4], list(range(8)), list(range(20, 60))]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SyncWorld]:
    engine = {"engine": "vllm", "python": PYTHON, "tensor": request.param}
    built = SyncWorld(MODEL, {"ranks": 2, "pipeline": 2}, [engine], tmp_path_factory.mktemp("vllm"))
    try:
        yield built
    finally:
        session = built.workers[0].supervisor.engine.pid
        built.close()
    assert guard.session_members(session) == []


def wait_begun(asked: Asking) -> None:
    """Until the first token of the first request has come."""
    deadline = time.monotonic() + 60.0
    while not len(asked.so_far(0).token_ids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_whole_weights_arrive_and_are_named(world: SyncWorld) -> None:
    for seed in (1, 2, 3):
        assert world.sync(world.train(seed)).stale == {}
        assert world.difference(0, seed, PROMPTS) <= FACTOR
        [found] = world.client(0).generate([[1, 2]], SamplingConfig(temperature=0.7), 4)
        assert [(span.version, span.start, span.end) for span in found.weight_versions] == [
            (str(world.version), 0, 4)
        ]


def test_a_request_that_waits_during_a_sync_goes_on_with_the_new_weights(world: SyncWorld) -> None:
    world.sync(world.train(4))
    engine = world.workers[0].supervisor.engine
    told = dict[int, Completion]()
    with ThreadPoolExecutor(1) as pool:
        asked = engine.ask(TokenRequests([[3, 1]], SamplingConfig(), [240], []), told.__setitem__)
        wait_begun(asked)
        synced = pool.submit(world.sync, world.train(5))
        asked.done.result(120.0)
        assert synced.result(120.0).stale == {}
    versions = [span.version for span in told[0].weight_versions]
    assert told[0].finish_reason == "length" and len(told[0].token_ids) == 240
    assert versions in ([str(world.version - 1)], [str(world.version - 1), str(world.version)])


def test_a_request_is_aborted(world: SyncWorld) -> None:
    engine = world.workers[0].supervisor.engine
    told = dict[int, Completion]()
    asked = engine.ask(
        TokenRequests([[3, 1], [4]], SamplingConfig(), [1000, 2], []), told.__setitem__
    )
    wait_begun(asked)
    asked.abort([0])
    asked.done.result(60.0)
    assert told[1].finish_reason == "length" and told[0].finish_reason == "abort"


def test_what_it_cannot_answer_is_refused_and_it_lives(world: SyncWorld) -> None:
    engine = world.workers[0].supervisor.engine
    with pytest.raises(
        EngineError, match="prompt 0 contains token 96, but the model's token ids are 0 to 95"
    ):
        engine.generate([[96]], SamplingConfig(), 4)
    with pytest.raises(EngineError, match="longer than the maximum model length"):
        engine.generate([[1] * 2000], SamplingConfig(), 4)
    with pytest.raises(EngineError, match=r"set top_p=1 and top_k=-1"):
        engine.generate([[1]], SamplingConfig(top_p=0.5), 4)
    engine.sleep()
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    assert len(engine.generate([[1]], SamplingConfig(), 4)[0].token_ids) == 4


def test_no_path_answers_without_the_key_and_all_listen_on_loopback(world: SyncWorld) -> None:
    engine = world.workers[0].supervisor.engine
    for path in (
        "/collective_rpc",
        "/pause",
        "/sleep",
        "/inference/v1/generate",
        "/health",
        "/metrics",
    ):
        assert requests.post(engine.url + path, json={}, timeout=60).status_code == 401
    members = [psutil.Process(pid) for pid in guard.session_members(engine.pid)]
    heard = {
        c.laddr.ip for p in members for c in p.net_connections() if c.status == psutil.CONN_LISTEN
    }
    assert heard == {"127.0.0.1"}
    assert all(engine.admin_key not in " ".join(process.cmdline()) for process in members)
