"""What `engines.base.Engine` promises, asked of a real engine of every kind over the same model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import ENGINES, Completion, Engine
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from tests.dist.harness.rounding import FACTOR, distance
from tests.models import DENSE_UNTIED

VLLM_PYTHON = os.environ.get("HYBRIDFLOW_VLLM_PYTHON", "")
KINDS = [
    "hf",
    "sglang",
    pytest.param(
        "vllm",
        marks=pytest.mark.skipif(
            not VLLM_PYTHON,
            reason=(
                "vLLM is in no lock of ours, and HYBRIDFLOW_VLLM_PYTHON names no interpreter that "
                "has it; tests/unit/engines/test_vllm.py has answers recorded from a real server"
            ),
        ),
    ),
]
pytestmark = pytest.mark.slow
PROMPTS = [[7], [3, 1, 4], list(range(8)), list(range(20, 60)), [3, 1, 4, 1, 5]]
GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model whose vocabulary and heads suit all kinds."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {
        key: value
        for key, value in DENSE_UNTIED.items()
        if key not in ("model_type", "architectures")
    }
    torch.manual_seed(0)
    wide = {
        "head_dim": 32,
        "vocab_size": 96,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    }
    config = Qwen3Config(**{**sizes, **wide, "eos_token_id": None})
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def build(kind: str, model: Path, log: Path) -> Engine:
    spec = EngineSpec("engine-0", str(model), python=VLLM_PYTHON if kind == "vllm" else "")
    return ENGINES.get(kind)(spec, log, lambda: None)


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    built = build(request.param, model, tmp_path_factory.mktemp(request.param) / "engine.log")
    try:
        built.start()
        built.wait_ready()
        take_weights_of(built, model)
        yield built
    finally:
        built.stop()


def take_weights_of(engine: Any, model: Path) -> None:
    """Servers read the folder themselves; an engine in this process takes the weights from its
    trainer."""
    if not hasattr(engine, "take"):
        return
    held = load_file(model / "model.safetensors")

    def fill(places: Mapping[str, torch.Tensor]) -> int:
        for name, place in places.items():
            place.copy_(held[name])
        return len(places)

    assert engine.take("default", fill) == len(held)


def logits_of(
    model: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]
) -> list[torch.Tensor]:
    """[t, v] of each response, from one forward pass of transformers over the whole row."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            found.append(
                reference(torch.tensor([[*prompt, *answer.token_ids]])).logits[
                    0, len(prompt) - 1 : -1
                ]
            )
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_answers_come_in_order_with_the_policys_log_probs(
    engine: Engine, model: Path, temperature: float
) -> None:
    answers = engine.generate(PROMPTS, SamplingConfig(temperature=temperature), 12)
    rows = [
        ([*prompt, *answer.token_ids], len(prompt), answer.log_probs)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    assert distance(model, rows, temperature or 1.0) <= FACTOR
    for answer, logits in zip(answers, logits_of(model, PROMPTS, answers), strict=True):
        assert answer.finish_reason == "length" and len(answer.token_ids) == 12
        if temperature == 0.0:
            assert list(answer.token_ids) == logits.argmax(-1).tolist()


def test_the_weights_of_every_token_are_named(engine: Engine) -> None:
    for answer in engine.generate(PROMPTS, SamplingConfig(), 5):
        assert [(span.version, span.start, span.end) for span in answer.weight_versions] == [
            ("default", 0, 5)
        ]


def test_a_stop_token_ends_and_is_part_of_the_response(engine: Engine) -> None:
    whole = list(engine.generate([[5, 6]], GREEDY, 6)[0].token_ids)
    stopped, other = engine.generate([[5, 6], [7]], GREEDY, 6, [whole[2]])
    assert (
        stopped.finish_reason == "stop"
        and list(stopped.token_ids) == whole[: whole.index(whole[2]) + 1]
    )
    assert len(stopped.log_probs) == len(stopped.token_ids)
    assert other.finish_reason == ("stop" if other.token_ids[-1] == whole[2] else "length")


def test_no_prompts_are_no_answers(engine: Engine) -> None:
    assert engine.generate([], SamplingConfig(), 4) == []


def test_what_the_model_cannot_read_is_refused_and_the_engine_lives(engine: Engine) -> None:
    for prompt in ([1] * 2000, [96]):
        with pytest.raises(EngineError, match="engine-0"):
            engine.generate([prompt], SamplingConfig(), 4)
        engine.check_alive()
        assert len(engine.generate([[1]], SamplingConfig(), 4)[0].token_ids) == 4


def test_it_answers_after_sleep(engine: Engine) -> None:
    """On a CPU no memory is given back, so the weights stay."""
    before = engine.generate([[5, 6]], GREEDY, 6)
    engine.sleep()
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    assert list(engine.generate([[5, 6]], GREEDY, 6)[0].token_ids) == list(before[0].token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_does_not_run_says_so(kind: str, model: Path, tmp_path: Path) -> None:
    built = build(kind, model, tmp_path / "engine.log")
    with pytest.raises(EngineError, match="engine-0"):
        built.check_alive()
    built.stop()
    built.stop()


def test_one_that_has_stopped_is_not_alive(engine: Engine) -> None:
    """The last test of the kind: its engine has ended afterwards."""
    engine.stop()
    engine.stop()
    with pytest.raises(EngineError, match="engine-0"):
        engine.check_alive()
