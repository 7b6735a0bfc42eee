"""Engines that load their own weights: asked through the same requests as a run's, restarted without a
trainer, and stopped. The kind of engine is one that a user would add."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from hybridflow.errors import EnginesLostError
from hybridflow.inference.engines import Started, started
from hybridflow.inference.model import Model
from hybridflow.inference.serving import Asking
from hybridflow.observe.progress import Progress
from hybridflow.single_controller import begin, block_on
from hybridflow.trainer.preload import Preload
from tests.unit.agents.talks import FAMILIES, byte_tokenizer

KIND = f"{Path(__file__).parents[1] / 'engines' / 'counting_engine.py'}:counting"


@contextmanager
def engines(folder: Path, count: int = 2) -> Iterator[tuple[Started, list[Any]]]:
    """Two engines of a folder with weights, and their workers."""
    engine_folder = folder / "engine"
    engine_folder.mkdir(parents=True)
    (engine_folder / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    (engine_folder / "model.safetensors").write_bytes(b"")
    rollout = RolloutConfig(engine=KIND, num_engines=count, max_restarts=1, start_timeout_s=5)
    config = RunConfig(rollout=rollout, data=DataConfig(max_response_length=8), model=ModelConfig())
    tokenizer = byte_tokenizer(folder / "tokenizer", *FAMILIES["chatml"])
    model = Model(config, tokenizer, engine_folder, engine_folder, folder)
    # no fork servers
    none = Preload(replace(config, cluster=ClusterConfig(in_process=True)), with_engines=False)
    with started(model, 0, folder / "logs", none, Progress(0, "", enabled=False)) as found:
        found.wait()
        yield found, found.requests.group.workers  # type: ignore[attr-defined]


def test_engines_answer_with_the_weights_of_their_folder(tmp_path: Path) -> None:
    with engines(tmp_path) as (found, workers):
        asking = Asking(found.requests)
        running = begin(asking.run())

        async def ask() -> list[list[int]]:
            answers = []
            for start in (5, 50, 500):
                sampled = await asking.sample([1, start], 3, SamplingConfig())
                answers.append(sampled.token_ids.tolist())
            return answers

        assert block_on(ask()) == [[6, 7, 8], [51, 52, 53], [501, 502, 503]]
        running.cancel()
    assert not any(worker.supervisor.engine.running for worker in workers)


def test_a_lost_engine_is_started_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    with engines(tmp_path, count=1) as (found, [worker]):
        asking = Asking(found.requests)
        running = begin(asking.run())

        async def ask() -> list[int]:
            tokens: list[int] = (
                await asking.sample([1, 5], 3, SamplingConfig())
            ).token_ids.tolist()
            return tokens

        assert block_on(ask()) == [6, 7, 8]
        worker.supervisor.engine.kill()
        assert block_on(ask()) == [6, 7, 8] and worker.supervisor.restarts == 1
        worker.supervisor.engine.kill()
        with pytest.raises(EnginesLostError, match=r"limit rollout.max_restarts=1 per hour"):
            block_on(ask())
        # a server ends with the reason
        with pytest.raises(EnginesLostError, match=r"max_restarts=1 per hour"):
            block_on(running)


def test_an_engines_own_settings_are_those_of_each_request(tmp_path: Path) -> None:
    with engines(tmp_path, count=1) as (found, [worker]):
        asked: list[tuple[SamplingConfig, int]] = []
        engine = worker.supervisor.engine
        generate = engine.generate

        def noted(prompts: Any, sampling: SamplingConfig, *rest: Any, **more: Any) -> Any:
            asked.append((sampling, len(prompts)))
            return generate(prompts, sampling, *rest, **more)

        engine.generate = noted
        warm, cold = SamplingConfig(temperature=0.5), SamplingConfig(top_p=0.5)
        settings = [warm, cold, warm, replace(warm)]
        requests = found.requests

        async def ask() -> None:
            made = [
                requests.ask([n], 2, training=False, sampling=how) for n, how in enumerate(settings)
            ]
            while not all(one.done() for one in made):
                await requests.advance()

        block_on(ask())
        assert sorted(asked, key=repr) == sorted([(warm, 3), (cold, 1)], key=repr)
