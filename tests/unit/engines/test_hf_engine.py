"""The engine `hf` against transformers' plain forward pass: log-probs, stop tokens, versions, and
what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    DataConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    ValSamplingConfig,
)
from hybridflow.errors import EngineError
from hybridflow.rollout.in_process import InProcessRollouts
from hybridflow.single_controller import block_on
from tests.models import DENSE, FAMILIES
from tests.unit.engines.hf_engines import engine_of, fill

PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]


def checked(
    engine: Any,
    sampling: SamplingConfig,
    most: int,
    stops: list[int],
    prompts: list[list[int]] = PROMPTS,
) -> list[Any]:
    """Answers whose log-probs are those of one forward pass over each whole sequence."""
    completions = engine.generate(prompts, sampling, most, stops)
    for prompt, done in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + done.token_ids])
        logits = engine._model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        found = expected.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.log_probs), found, atol=1e-5, rtol=0)
        assert [(span.version, span.start, span.end) for span in done.weight_versions] == [
            ("7", 0, len(done.token_ids))
        ]
        if sampling.temperature == 0:
            assert done.token_ids == logits.argmax(-1).tolist()
    return completions


def test_supports_and_log_probs_are_those_of_the_cut_distribution(tmp_path: Path) -> None:
    """Stop tokens end the supports too."""
    engine = engine_of(DENSE, tmp_path)
    sampling = SamplingConfig(0.7, 0.9, 5)
    fill(engine)
    sizes = set()
    for prompt, done in zip(
        PROMPTS,
        engine.generate(PROMPTS, sampling, 9, list(range(0, 90, 2)), with_support=True),
        strict=True,
    ):
        assert len(done.support) == len(done.token_ids) == len(done.log_probs)
        logits = engine._model(input_ids=torch.tensor([prompt + done.token_ids])).logits[
            0, len(prompt) - 1 : -1
        ]
        start = 0
        for row, token, value, size in zip(
            logits, done.token_ids, done.log_probs, done.support.sizes, strict=True
        ):
            ids = done.support.ids[start : start + size].tolist()
            assert set(ids) == set(row.topk(size).indices.tolist()) and size <= 5
            assert abs(float((row[ids] / 0.7).log_softmax(-1)[ids.index(token)]) - value) <= 1e-5
            sizes.add(int(size))
            start += size
        assert start == len(done.support.ids)
    assert len(sizes) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_loaded_by_the_names_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    """The tensors that the engine asks for are the family's (else it would not start), and they are
    the live ones."""
    engine = engine_of(FAMILIES[name], tmp_path)
    fill(engine, 0.1)
    checked(engine, SamplingConfig(), 3, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_several_samples_is_read_once(name: str, tmp_path: Path) -> None:
    """But for its last token, which each sample begins with."""
    engine = engine_of(FAMILIES[name], tmp_path)
    fill(engine, 0.1)
    read: list[tuple[int, ...]] = []
    engine._model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: read.append(inputs[0].shape)
    )
    engine.generate(PROMPTS * 4, SamplingConfig(), 3, [])
    assert read == [(3, 4), (12, 1), (12, 1), (12, 1)]
    sampled = checked(engine, SamplingConfig(), 3, [], PROMPTS * 4)
    assert len({tuple(done.token_ids) for done in sampled[::3]}) > 1
    # of one token: nothing is left to share
    assert checked(engine, SamplingConfig(), 3, [], [PROMPTS[1]] * 2)


def test_samples_stop_where_they_should(tmp_path: Path) -> None:
    # two batches, of prompts of different lengths
    engine = engine_of(DENSE, tmp_path, max_running_requests=2)
    fill(engine)
    free = checked(engine, ValSamplingConfig(temperature=0.0), 12, [])
    assert [done.finish_reason for done in free] == ["length"] * 3 and {
        len(done.token_ids) for done in free
    } == {12}
    stop = free[0].token_ids[4]
    stopped = checked(engine, ValSamplingConfig(temperature=0.0), 12, [stop])
    assert (
        stopped[0].finish_reason == "stop"
        and stopped[0].token_ids[-1] == stop not in stopped[0].token_ids[:-1]
    )
    for done, whole in zip(stopped, free, strict=True):
        assert whole.token_ids[: len(done.token_ids)] == done.token_ids


def test_the_end_token_of_the_models_config_ends_no_response(tmp_path: Path) -> None:
    engine = engine_of(DENSE, tmp_path)
    fill(engine)
    free = checked(engine, ValSamplingConfig(temperature=0.0), 12, [])
    other = engine_of({**DENSE, "eos_token_id": free[0].token_ids[4]}, tmp_path)
    fill(other)
    assert checked(other, ValSamplingConfig(temperature=0.0), 12, []) == free


@pytest.mark.slow
def test_samples_follow_from_seed_version_and_prompts(tmp_path: Path) -> None:
    engine = engine_of(DENSE, tmp_path)
    fill(engine, 0.05)
    hot = SamplingConfig(temperature=1.3)
    before = torch.get_rng_state()
    one, two = (checked(engine, hot, 20, []) for _ in range(2))
    assert one == two and torch.equal(before, torch.get_rng_state())
    narrow = checked(engine, SamplingConfig(temperature=1.3, top_k=1), 20, [])
    assert [done.token_ids for done in narrow] != [done.token_ids for done in one]
    greedy = engine.generate(PROMPTS, ValSamplingConfig(temperature=0.0), 20, [])
    assert [done.token_ids for done in narrow] == [done.token_ids for done in greedy]
    fill(engine, 0.05, version="8")
    assert engine.generate(PROMPTS, hot, 20, []) != one


def test_requests_that_are_aborted_are_never_computed(tmp_path: Path) -> None:
    """In the trainer's process, two at a time (tail batching): what waits at the engine gives its
    place back."""
    engine = engine_of(DENSE, tmp_path, max_running_requests=2)
    rollouts = InProcessRollouts(
        engine,
        lambda _: 0,
        RunConfig(
            data=DataConfig(max_response_length=5),
            rollout=RolloutConfig(max_running_requests=2),
            trainer=TrainerConfig(tail_batching=0.5),
        ),
        [],
    )
    fill(engine)
    answered: list[list[int]] = []
    generate = engine.generate

    def noted(prompts: Any, *rest: Any) -> Any:
        answered.extend(prompts)
        return generate(prompts, *rest)

    engine.generate = noted
    rows = [[token, 4] for token in range(3, 11)]
    requests = rollouts.begin(
        DataProto.from_columns({"prompt_ids": Jagged.from_rows(rows, np.int64)}), training=True
    )
    block_on(rollouts.advance())
    assert [one.done() for one in requests] == [True, True, *[False] * 6]
    block_on(rollouts.abort([requests[number] for number in (0, 2, 3, 6)]))
    batch = block_on(rollouts.answers([requests[number] for number in (1, 4, 5, 7)]))
    assert answered == [rows[number] for number in (0, 1, 4, 5, 7)] and rollouts.is_idle
    assert batch["finish_reason"].tolist() == ["length"] * 4
    assert batch.lengths("response_ids").tolist() == [5] * 4
    assert not rollouts._asked


def test_an_engine_without_whole_weights_does_not_answer(tmp_path: Path) -> None:
    engine = engine_of(DENSE, tmp_path)

    def broken(places: Mapping[str, torch.Tensor]) -> int:
        raise ValueError("torn")

    for attempt in range(2):
        with pytest.raises(EngineError, match="weights are missing or incomplete"):
            engine.generate(PROMPTS, SamplingConfig(), 2, [])
        if not attempt:
            fill(engine)
            with pytest.raises(ValueError, match="torn"):
                engine.take("8", broken)
    with pytest.raises(EngineError, match="cluster=in-process"):
        engine.describe("127.0.0.1", 1, 1.0)
    engine.stop()
    with pytest.raises(EngineError, match="not running"):
        engine.check_alive()


def test_the_views_are_those_that_transformers_loads(tmp_path: Path) -> None:
    """transformers' own loading of a checkpoint with these tensors gives the same model."""
    from safetensors.torch import save_file

    from hybridflow.engines.hf.engine import checkpoint_tensors

    hf = FAMILIES["qwen3_moe"]
    engine = engine_of(hf, tmp_path)
    fill(engine)
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
    tensors = {name: view.clone() for name, view in checkpoint_tensors(engine._model)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(loaded(ids).logits, engine._model(ids).logits)
