"""Unmodified SGLang servers of every shape on this machine against transformers, among them
DeepSeek's latent attention."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines import guard
from hybridflow.engines.base import Completion
from hybridflow.engines.sglang.engine import EngineClient, SglangEngine
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from tests.dist.harness.ranks import free_port
from tests.dist.harness.rounding import FACTOR, distance
from tests.dist.harness.sync_world import SyncWorld
from tests.models import ENGINE_DEEPSEEK, ENGINE_MOE, ENGINE_MOONLIGHT

pytestmark = pytest.mark.slow
ONLY_PUBLISHED = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}  # transformers does not keep these
PROMPTS = [[7], [3, 1, 4], list(range(8)), list(range(20, 90)), [9] * 25, [3, 1, 4, 1, 5]]


def save(folder: Path, model: dict[str, Any], seed: int) -> Path:
    """A random model whose norms and expert biases differ from one and zero, with a config as
    published checkpoints have it."""
    torch.manual_seed(seed)
    sizes = {key: value for key, value in model.items() if key != "model_type"}
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model["model_type"], **sizes)
    ).float()
    with torch.no_grad():
        for tensor in (
            *network.parameters(),
            *(b for name, b in network.named_buffers() if "correction" in name),
        ):
            if tensor.ndim == 1:
                tensor.add_(0.1 * torch.randn_like(tensor))
    network.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    if model["model_type"] == "deepseek_v3":
        written.pop("rope_parameters")
        written |= ONLY_PUBLISHED | {"rope_scaling": model["rope_scaling"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def worst_difference(
    model: Path, completions: Sequence[Completion], prompt_log_probs: Sequence[Sequence[float]]
) -> float:
    """`rounding.distance` over all tokens, prompts included."""
    rows = [
        ([*prompt, *completion.token_ids], 1, [*given, *completion.log_probs])
        for prompt, completion, given in zip(PROMPTS, completions, prompt_log_probs, strict=True)
    ]
    return distance(model, rows)


def check(server: SglangEngine, model: Path) -> None:
    """Prompt and generated log-probs are transformers', with an empty and with a filled prefix
    cache."""
    client = EngineClient(server.url, server.admin_key, 60.0)
    for _ in range(2):
        completions = client.generate(PROMPTS, SamplingConfig(), 12)
        assert {len(c.token_ids) for c in completions} == {12}
        assert (
            worst_difference(
                model, completions, [prompt_log_probs(server, prompt) for prompt in PROMPTS]
            )
            <= FACTOR
        )


def prompt_log_probs(server: SglangEngine, prompt: list[int]) -> list[float]:
    """The log-probs of all tokens but the first."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = post(server, "generate", body)
    return [row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]]


def post(server: SglangEngine, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(
        f"{server.url}/{path}",
        json=body,
        headers={"Authorization": f"Bearer {server.admin_key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        # one in `make test`: the engines of `test_weight_layouts`
        pytest.param(
            ENGINE_DEEPSEEK,
            {"tensor": 2, "expert": 2},
            id="deepseek-tp2-ep2",
            marks=pytest.mark.full,
        ),
        pytest.param(ENGINE_DEEPSEEK, {"tensor": 2}, id="deepseek-tp2", marks=pytest.mark.full),
        pytest.param(
            ENGINE_MOE, {"tensor": 2, "expert": 2}, id="qwen3-moe-tp2-ep2", marks=pytest.mark.full
        ),
        pytest.param(ENGINE_MOE, {"pipeline": 2}, id="qwen3-moe-pp2", marks=pytest.mark.full),
        pytest.param(ENGINE_DEEPSEEK, {"pipeline": 2}, id="deepseek-pp2", marks=pytest.mark.full),
        pytest.param(
            ENGINE_MOE,
            {"tensor": 2, "data_attention": 2},
            id="qwen3-moe-tp2-dpa2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ENGINE_DEEPSEEK,
            {"tensor": 2, "data_attention": 2, "expert": 2},
            id="deepseek-tp2-dpa2-ep2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_log_probs_equal_transformers(
    tmp_path: Path, model: dict[str, Any], shape: dict[str, int]
) -> None:
    first, second = (
        save(tmp_path / name, model, seed) for seed, name in enumerate(("first", "second"))
    )
    with SglangEngine(
        EngineSpec(name="engine", model_path=str(first), **shape), tmp_path / "engine.log"
    ) as server:
        server.start()
        server.wait_ready(400.0)
        check(server, first)
        assert post(server, "update_weights_from_disk", {"model_path": str(second)})["success"]
        check(server, second)
    assert guard.session_members(server.pid) == []


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        # `test_weight_layouts` brings slices of this family to such an engine, too
        pytest.param(
            ENGINE_DEEPSEEK,
            {"tensor": 2, "expert": 2},
            id="deepseek-tp2-ep2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ENGINE_DEEPSEEK,
            {"tensor": 2, "data_parallel_attention": 2, "expert": 2},
            id="deepseek-tp2-dpa2",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ENGINE_MOE,
            {"tensor": 2, "data_parallel_attention": 2, "expert": 2},
            id="qwen3-moe-tp2-dpa2",
            marks=pytest.mark.full,
        ),
        pytest.param(ENGINE_MOE, {"pipeline": 2}, id="qwen3-moe-pp2", marks=pytest.mark.full),
        pytest.param(ENGINE_DEEPSEEK, {"pipeline": 2}, id="deepseek-pp2", marks=pytest.mark.full),
        pytest.param(
            ENGINE_MOE, {"tensor": 2, "pipeline": 2}, id="qwen3-moe-tp2-pp2", marks=pytest.mark.full
        ),
    ],
)
def test_slices_reach_engines_of_each_shape(
    tmp_path: Path, model: dict[str, Any], shape: dict[str, int]
) -> None:
    """From two pipeline stages of a trainer; the engine starts without weights."""
    world = SyncWorld({**model, **ONLY_PUBLISHED}, {"ranks": 2, "pipeline": 2}, [shape], tmp_path)
    try:
        if "pipeline" in shape:
            world.configure(pause="abort")
        for seed in (1, 2):
            assert world.sync(world.train(seed)).stale == {}
            assert world.difference(0, seed) <= FACTOR
    finally:
        world.close()


@pytest.mark.full  # `test_weight_sync` writes in place, `test_weight_layouts` latent attention
def test_weights_of_latent_attention_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moonlight (no query latent, plain rotary embedding), updated by a loader of ours."""
    first, second = (
        save(tmp_path / name, ENGINE_MOONLIGHT, seed)
        for seed, name in enumerate(("first", "second"))
    )
    monkeypatch.setenv("TEST_WEIGHTS", str(second / "model.safetensors"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    loader = "tests.dist.harness.engine_loaders.load_in_place"
    spec = EngineSpec(
        name="engine", model_path=str(first), extra_args={"custom-weight-loader": [loader]}
    )
    with SglangEngine(spec, tmp_path / "engine.log") as server:
        server.start()
        server.wait_ready(400.0)
        check(server, first)
        post(server, "begin_weight_update", {})
        nothing = base64.b64encode(pickle.dumps([])).decode()
        answer = post(
            server,
            "update_weights_from_tensor",
            {"serialized_named_tensors": [nothing], "load_format": loader},
        )
        assert answer["success"], answer
        post(server, "end_weight_update", {})
        check(server, second)


@pytest.mark.parametrize(
    ("shape", "killed"), [("pipeline", False), pytest.param("tensor", True, marks=pytest.mark.full)]
)
def test_a_run_starts_engines_over_two_nodes_and_starts_them_again_as_a_whole(
    tmp_path: Path, shape: str, killed: bool
) -> None:
    """As `rollout.nodes_per_engine` has it: a worker a node, a server each. The server of the
    second node may be killed in between."""
    world = SyncWorld(
        ENGINE_MOE, {"ranks": 2, "pipeline": 2}, [{shape: 2, "nodes_per_engine": 2}], tmp_path
    )
    try:
        world.configure(pause="abort")  # which a pipeline needs
        assert world.sync(world.train(1)).stale == {}
        assert world.difference(0, 1) <= FACTOR
        assert (tmp_path / "engine-0.log").is_file() and (tmp_path / "engine-0.node1.log").is_file()
        (node,) = [other._node for other in world.others]
        assert node is not None and node.server is not None
        if killed:
            _kill_and_wait(world, node.server.pid)
        assert world.sync(world.train(2)).stale == {}
        assert world.difference(0, 2) <= FACTOR
        sessions = [world.workers[0].supervisor.engine.pid, node.server.pid]
    finally:
        world.close()
    assert [guard.session_members(pid) for pid in sessions] == [[], []]


def _kill_and_wait(world: SyncWorld, session: int) -> None:
    """Kill a node's server; return when the engine has been started again."""
    for pid in guard.session_members(session):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while world.states()[0].restarts == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert world.states(wait_s=300.0)[0].state == "up"


@pytest.mark.full
def test_an_engine_over_two_nodes(tmp_path: Path) -> None:
    """Two servers on this machine, one a node, with one rank each."""
    model = save(tmp_path / "model", ENGINE_DEEPSEEK, 0)
    spec = EngineSpec(
        name="first",
        model_path=str(model),
        tensor=2,
        nnodes=2,
        dist_init_addr=f"127.0.0.1:{free_port()}",
    )
    servers = [
        SglangEngine(replace(spec, name=f"node{i}", node_rank=i), tmp_path / f"node{i}.log")
        for i in range(2)
    ]
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server).start()
        for server in servers:
            server.wait_ready(400.0)
        check(servers[0], model)
        for server in servers:
            server.check_alive()
    assert [guard.session_members(server.pid) for server in servers] == [[], []]


def test_several_nodes_need_an_address(tmp_path: Path) -> None:
    server = SglangEngine(
        EngineSpec(name="lost", model_path=str(tmp_path), tensor=2, nnodes=2), tmp_path / "log"
    )
    with pytest.raises(EngineError, match=r"dist_init_addr must be HOST:PORT with nnodes=2"):
        server.start()
