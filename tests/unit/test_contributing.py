"""Every example of CONTRIBUTING.md is short, and works as it stands when it is written into a file
of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.config.load import load_config
from hybridflow.config.schema import RewardConfig, SamplingConfig
from hybridflow.single_controller import block_on
from tests.models import LLAMA
from tests.unit.trainer.worlds import World, config_of, trainer_of

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
EXAMPLES: dict[str, str] = {
    title: code
    for title, body in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    for code in re.findall(r"```python\n(.*?)```", body, re.DOTALL)
}
MAX_LINES = 30


def estimator(file: str, folder: Path) -> None:
    config = config_of(folder, total_steps=1)
    seen = []
    algorithm = replace(
        config.algorithm, adv_estimator=f"{file}:plain", adv_estimator_options={"scale": 2.0}
    )

    class Noting(World):
        async def update(self, method: Any, batch: Any, seed: Any = None) -> Any:
            seen.append(batch)
            return await super().update(method, batch, seed)

    block_on(trainer_of(replace(config, algorithm=algorithm), Noting()).fit())
    [batch] = seen
    expected = np.repeat(
        (batch["scores"] - batch["scores"].mean()) * 2, batch.lengths("response_ids")
    )
    np.testing.assert_allclose(batch.jagged("advantages").values, expected, atol=1e-6)


def policy_loss(file: str, folder: Path) -> None:
    from hybridflow.algorithms.policy_losses.base import Tokens
    from hybridflow.config.check import check
    from hybridflow.config.entries import POLICY_LOSSES

    check(load_config("e2e", [f"actor.policy_loss={file}:reinforce"]))
    entry = POLICY_LOSSES.get(f"{file}:reinforce")
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = {"advantages": torch.tensor([1.0, -0.5]), "old_log_probs": torch.tensor([-1.0, -2.0])}
    loss, metrics = entry.function(Tokens(log_probs, torch.tensor([2]), columns), entry.options())
    loss.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [-1.0, 0.5]
    assert metrics["actor/weight"].tolist() == [1.0, 1.0]


def reward(file: str, folder: Path) -> None:
    from hybridflow.rewards.manager import RewardManager

    manager = RewardManager(
        RewardConfig(processes=0, verifiers=(f"{file}:upper",), kwargs={"partial": 0.1})
    )
    found = manager.score(["mine", "mine"], ["YES", "yes"], ["yes", "yes"])
    assert [result.score for result in found] == [1.0, 0.1] and found[0].extra == {"length": 3}


def tracker(file: str, folder: Path) -> None:
    from hybridflow.observe.tracker import Tracker

    with Tracker(folder, (f"{file}:lines",)) as own:
        own.log(1, {"a": 0.5})
        own.log(2, {"a": 0.6})
        own.truncate_after("train", 1)
    assert (folder / "lines.txt").read_text() == "('train', 1, {'a': 0.5})"


def family(file: str, folder: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from hybridflow.errors import ModelError
    from hybridflow.models import family_of
    from hybridflow.models.family import use_family

    sizes = {
        key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")
    }
    config = MistralConfig(**sizes, sliding_window=None)
    use_family(f"{file}:mistral")
    found = family_of(config.to_dict())
    model = MistralForCausalLM(config)
    assert found.tensors() == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    with pytest.raises(ModelError, match="sliding_window"):
        family_of({**config.to_dict(), "sliding_window": 64})


def transport(file: str, folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from hybridflow.process.rendezvous import master_store
    from hybridflow.sync.transports import open_receiver, open_sender
    from hybridflow.sync.transports.base import LAST_TAG, TRANSPORTS, Endpoint, Payload

    store = master_store("127.0.0.1", 0, 20)
    endpoint = Endpoint(
        f"{file}:counted", "counted", "127.0.0.1", store.port, (0,), (0,), 1 << 20, 10.0
    )
    sent, got = (Payload(make(100, dtype=torch.uint8)) for make in (torch.ones, torch.zeros))
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(open_sender, endpoint, 0), pool.submit(open_receiver, endpoint, 0)
        sender = ends[0].result(20)
        receiver = ends[1].result(20)
        sending = pool.submit(lambda: sender.send(0, LAST_TAG, sent).wait())
        receiver.receive(0, LAST_TAG, got).wait()
        sending.result(20)
    sender.close()
    receiver.close()
    counting: Any = TRANSPORTS.get(endpoint.transport).open_sender
    assert torch.equal(sent.tensor, got.tensor) and counting.sent == 100


def engine(file: str, folder: Path) -> None:
    from hybridflow.engines.base import ENGINES
    from hybridflow.trainer.generation import _LOCAL

    spec: Any = None
    made = ENGINES.get(f"{file}:parrot")(spec, folder / "engine.log", lambda: None)
    [answer] = made.generate([[5, 6, 7]], SamplingConfig(), 2)
    assert answer.token_ids == [5, 6] and answer.weight_versions[0].end == 2
    assert all(callable(getattr(made, name)) for name in _LOCAL)  # it runs with cluster=in-process


RUNS: dict[str, Callable[[str, Path], None]] = {
    "An advantage estimator": estimator,
    "A policy loss": policy_loss,
    "A reward": reward,
    "A tracker": tracker,
    "A model family": family,
    "A transport": transport,
    "An engine kind": engine,
}


def test_every_example_is_run() -> None:
    assert set(EXAMPLES) == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_works_from_a_file_of_ones_own(title: str, tmp_path: Path) -> None:
    assert len(EXAMPLES[title].splitlines()) <= MAX_LINES
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLES[title])
    RUNS[title](str(file), tmp_path)
