"""Two real engines on this machine: log-probs against transformers, isolation, and the end of
processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridflow.batch import ROUTES, DataProto, Jagged, with_free_end, write_parquet
from hybridflow.config.schema import SamplingConfig
from hybridflow.engines import guard
from hybridflow.engines.base import Completion, Extras
from hybridflow.engines.sglang.engine import EngineClient, SglangEngine
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from hybridflow.sync.session import Control
from tests.dist.harness.asking import generating
from tests.dist.harness.ranks import run_ranks
from tests.dist.harness.rounding import FACTOR, distance

pytestmark = pytest.mark.slow
LAYERS = 4
VOCABULARY = 96
PROMPTS = [[7], [3, 1, 4], list(range(8)), list(range(20, 60)), [9] * 25, [3, 1, 4, 1, 5]] * 3


def save_tiny_moe(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_moe(root / name, seed) for seed, name in enumerate(("first",))]


class Pair:
    """Both engines and their clients."""

    def __init__(self, servers: Sequence[SglangEngine]) -> None:
        self.servers = servers
        self.clients = [EngineClient(s.url, s.admin_key, 60.0, name=s.spec.name) for s in servers]
        self.pool = ThreadPoolExecutor(8)

    def each(self, call: Callable[[EngineClient], Any]) -> list[Any]:
        return list(self.pool.map(call, self.clients))


@pytest.fixture(scope="module")
def pair(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    specs = [
        EngineSpec(name=f"engine-{i}", model_path=str(models[0]), return_routed_experts=True)
        for i in range(2)
    ]
    servers = [SglangEngine(spec, logs / f"{spec.name}.log") for spec in specs]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(300.0)
        yield Pair(servers)
    finally:
        for server in servers:
            server.stop()
    assert [guard.session_members(server.pid) for server in servers] == [[], []]


def worst_difference(
    model: Path,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    temperature: float,
) -> float:
    """`rounding.distance` from log softmax(logits / temperature) over all generated tokens."""
    rows = [
        ([*prompt, *completion.token_ids], len(prompt), completion.log_probs)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return distance(model, rows, temperature)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.7),
        SamplingConfig(0.7, 0.8, 12),
        SamplingConfig(temperature=0.0),
    ],
)
def test_log_probs_are_those_of_the_tempered_softmax(
    pair: Pair, models: list[Path], sampling: SamplingConfig
) -> None:
    for completions in pair.each(lambda client: client.generate(PROMPTS, sampling, 12)):
        assert {c.finish_reason for c in completions} == {"length"} and {
            len(c.token_ids) for c in completions
        } == {12}
        assert (
            worst_difference(models[0], PROMPTS, completions, sampling.temperature or 1.0) <= FACTOR
        )


def test_supports_and_log_probs_are_those_of_the_cut_distribution(
    pair: Pair, models: list[Path]
) -> None:
    """The least set of most likely tokens with a mass of 0.8, 12 at most, and among them the
    softmax of transformers' logits; the bound is 1e-5 where a run's is 1e-4."""
    sampling = SamplingConfig(0.7, 0.8, 12)
    reference = AutoModelForCausalLM.from_pretrained(models[0]).eval()
    found = pair.clients[0].generate(PROMPTS, sampling, 12, extras=Extras(support=True))
    sizes = list[int]()
    for prompt, completion in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = (
                reference(torch.tensor([[*prompt, *completion.token_ids]]))
                .logits[0, len(prompt) - 1 : -1]
                .double()
            )
        support = completion.support
        start = 0
        assert support is not None
        for row, token, log_prob, size in zip(
            (logits / 0.7).log_softmax(-1),
            completion.token_ids,
            completion.log_probs,
            support.sizes,
            strict=True,
        ):
            ids = support.ids[start : start + size].tolist()
            assert set(ids) == set(row.topk(size).indices.tolist()) and token in ids
            mass = row[ids].exp().sum().item()
            assert size == 12 or (
                mass >= 0.8 - 1e-5 and mass - row[ids].exp().min().item() <= 0.8 + 1e-5
            )
            assert abs(row[ids].log_softmax(-1)[ids.index(token)].item() - log_prob) <= 1e-5
            sizes.append(int(size))
            start += size
        assert start == len(support.ids)
    assert min(sizes) < max(sizes) <= 12


def test_routes_are_those_of_the_transformers_router_on_every_token(
    pair: Pair, models: list[Path]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    for completions in pair.each(
        lambda client: client.generate(PROMPTS, SamplingConfig(), 12, extras=Extras(routes=True))
    ):
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            tokens = [*prompt, *completion.token_ids]
            with torch.no_grad():
                logits = reference(
                    torch.tensor([tokens[:-1]]), output_router_logits=True
                ).router_logits
            expected = torch.stack([layer.topk(2).indices.sort().values for layer in logits], dim=1)
            routes = with_free_end(completion.routes, len(tokens), LAYERS, "engine")
            assert np.sort(routes[:-1]).tolist() == expected.tolist()


def test_replay_removes_the_difference_that_other_routes_make(
    pair: Pair, models: list[Path], tmp_path: Path
) -> None:
    """Megatron with the engine's weights, and with those weights rounded to bfloat16, along its own
    routes and along the engine's."""
    prompts = PROMPTS * 4
    completions = pair.clients[0].generate(
        prompts, SamplingConfig(), 40, extras=Extras(routes=True)
    )
    rows = [
        with_free_end(c.routes, len(p) + len(c.token_ids), LAYERS, "engine")
        for p, c in zip(prompts, completions, strict=True)
    ]
    batch = {
        "prompt_ids": Jagged.from_rows(prompts, np.int64),
        "response_ids": Jagged.from_rows([c.token_ids for c in completions], np.int64),
        "rollout_log_probs": Jagged.from_rows([c.log_probs for c in completions], np.float32),
        ROUTES: Jagged.from_rows(rows, np.int16),
    }
    write_parquet(tmp_path / "samples.parquet", DataProto.from_columns(batch))
    hf = json.loads((models[0] / "config.json").read_text())
    hf |= {"rope_theta": hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]}
    arguments = {"hf": hf, "folder": str(models[0]), "engine": str(tmp_path / "samples.parquet")}
    [found] = run_ranks(1, "tests.dist.cases.replay:along_engine_routes", **arguments)
    token_layers = sum(len(row) - 1 for row in rows) * LAYERS
    same = found["same"]
    rounded = found["rounded"]
    assert same["compared"] == rounded["compared"] == token_layers
    # equal weights: equal choices
    assert same["differing"] <= 1e-3 * token_layers and max(same["along"]) <= 1e-4
    assert rounded["differing"] >= 20, "the mismatch that replay is about does not occur"
    assert np.mean(rounded["along"]) < 0.8 * np.mean(rounded["free"])
    assert np.max(rounded["along"]) < np.max(rounded["free"])


def test_greedy_is_the_same_on_both_engines_and_in_one_or_many_requests(pair: Pair) -> None:
    first, second = pair.each(
        lambda client: client.generate(PROMPTS, SamplingConfig(temperature=0.0), 8)
    )
    server = pair.servers[0]
    cut = EngineClient(server.url, server.admin_key, 60.0, batch_size=4).generate(
        PROMPTS, SamplingConfig(temperature=0.0), 8
    )
    tokens = [[c.token_ids.tolist() for c in answers] for answers in (first, second, cut)]
    assert tokens[0] == tokens[1] == tokens[2]


def test_everything_listens_on_loopback(pair: Pair) -> None:
    for server in pair.servers:
        members = [psutil.Process(pid) for pid in (server.pid, *guard.session_members(server.pid))]
        heard = {
            (c.laddr.ip, c.laddr.port)
            for p in members
            for c in p.net_connections()
            if c.status == psutil.CONN_LISTEN
        }
        assert {ip for ip, _ in heard} == {"127.0.0.1"} and ("127.0.0.1", server.port) in heard


@pytest.mark.parametrize(
    "path",
    [
        "generate",
        "pause_generation",
        "continue_generation",
        "begin_weight_update",
        "end_weight_update",
        "init_weights_update_group",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_disk",
        "update_weight_version",
        "weights_checker",
        "flush_cache",
        "abort_request",
    ],
)
def test_no_call_without_the_key(pair: Pair, path: str) -> None:
    other = pair.servers[1].admin_key
    for headers in ({}, {"Authorization": f"Bearer {other}"}):
        assert (
            requests.post(
                f"{pair.servers[0].url}/{path}", json={}, headers=headers, timeout=60
            ).status_code
            == 401
        )


def test_the_key_is_in_no_command_line_and_the_log_is_private(pair: Pair) -> None:
    for server in pair.servers:
        for pid in (server.pid, *guard.session_members(server.pid)):
            assert server.admin_key not in " ".join(psutil.Process(pid).cmdline())
        assert server.log_path.stat().st_mode & 0o077 == 0
        assert server.admin_key not in server.log_tail(10_000)


@pytest.mark.full
def test_a_broken_model_is_an_error_with_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    server = SglangEngine(
        EngineSpec(name="broken", model_path=str(tmp_path)), tmp_path / "engine.log"
    )
    server.start()
    with pytest.raises(
        EngineError, match=r"engine broken: exited with status \d+(.|\n)*config.json"
    ):
        server.wait_ready(300.0)
    assert guard.session_members(server.pid) == [] and not psutil.pid_exists(server.pid)


START_AND_WAIT = """
import sys, time
from hybridflow.engines.sglang.engine import SglangEngine
from hybridflow.engines.spec import EngineSpec
server = SglangEngine(EngineSpec(name="orphan", model_path=sys.argv[1]), sys.argv[2])
server.start()
print(server.pid, flush=True)
server.wait_ready()
time.sleep(600)
"""


def test_an_engine_does_not_outlive_a_killed_parent(models: list[Path], tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", START_AND_WAIT, str(models[0]), str(tmp_path / "engine.log")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        session = int(parent.stdout.readline())
        deadline = time.monotonic() + 300.0
        # server, scheduler, detokenizer: still starting, the worst moment
        while len(guard.session_members(session)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        parent.kill()
    deadline = time.monotonic() + 300.0
    while guard.session_members(session) or psutil.pid_exists(session):
        assert time.monotonic() < deadline, "processes left behind"
        time.sleep(0.1)


def test_messages_to_the_ranks_outside_a_session_are_refused(pair: Pair) -> None:
    with pytest.raises(EngineError, match="begin_weight_update"):
        pair.clients[0].call_ranks(Control("describe", "127.0.0.1", 1, 1.0, "described", 0, 1))
    with pytest.raises(EngineError, match="no weight-update session"):
        pair.clients[0].end_weight_update()


def test_a_message_that_nobody_can_answer_does_not_end_the_engine(pair: Pair) -> None:
    """The store is gone: no report can be posted. SGLang says success; that the engine lives on is
    our loader's doing."""
    pair.clients[0].begin_weight_update()
    pair.clients[0].call_ranks(Control("describe", "127.0.0.1", 1, 0.5, "described", 0, 1))
    pair.clients[0].end_weight_update()
    (completion,) = pair.clients[0].generate([[1, 2]], SamplingConfig(), 2)
    assert len(completion.token_ids) == 2


def test_pause_abort_ends_requests(pair: Pair) -> None:
    with generating(pair.clients[0], PROMPTS[:4], 900) as running:
        pair.clients[0].pause("abort")
        assert {c.finish_reason for c in running.result(240.0)} == {"abort"}
    pair.clients[0].resume()


def test_an_engine_that_lost_its_scheduler_is_noticed(pair: Pair) -> None:
    """This is the last test of the module: it kills the engine."""
    server = pair.servers[1]
    server.check_alive()
    scheduler = next(
        pid
        for pid in guard.session_members(server.pid)
        if "scheduler" in " ".join(psutil.Process(pid).cmdline())
    )
    os.kill(scheduler, signal.SIGKILL)
    deadline = time.monotonic() + 300.0
    with pytest.raises(EngineError, match="engine engine-1: exited with status"):
        while time.monotonic() < deadline:
            server.check_alive()
            time.sleep(0.1)
    with pytest.raises(EngineError, match="no connection"):
        pair.clients[1].generate([[1]], SamplingConfig(), 1)
