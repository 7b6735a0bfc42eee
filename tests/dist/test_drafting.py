"""An engine that drafts tokens with the model's own multi-token-prediction head samples the same
model as one that does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.config.schema import SamplingConfig, SpeculativeConfig
from hybridflow.engines.sglang.engine import SglangEngine
from hybridflow.engines.spec import EngineSpec
from hybridflow.models import family_of
from hybridflow.models.weights import RandomWeights
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.generation import Engine
from hybridflow.planning.sizes import decoder_of
from hybridflow.reshard.engine_layouts import EngineShape
from tests.dist.harness.rounding import FACTOR
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import load_weights_from_disk, weights_checksum
from tests.models import FAMILIES

pytestmark = pytest.mark.slow
PROMPTS = [[7], [3, 1, 4], list(range(8)), list(range(20, 60)), [9] * 25]
STEPS = (0, 1, 3)
CACHED = 1 << 18  # tokens: enough to see the size of a cache in a log that has GB with two decimals


def write_model(folder: Path, name: str) -> Path:
    """A tiny model with a head that drafts each token again. The model often says it again too."""
    family = family_of({**FAMILIES[name], "num_nextn_predict_layers": 1}, mtp=True)
    source = RandomWeights(family.tensors(), seed=3, std=0.1)
    folder.mkdir()
    tensors = {n: source.read(n, (0,) * len(s), s) for n, s in family.tensors().items()}
    head = f"model.layers.{family.hf['num_hidden_layers']}."
    for tensor, values in tensors.items():
        if tensor.startswith(head) and tensor.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()  # its layer adds nothing to what eh_proj passes: the state
    width = family.hf["hidden_size"]
    tensors[f"{head}eh_proj.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **family.hf,
        "architectures": [family.architecture],
        "dtype": "float32",
        "eos_token_id": None,
        **(
            {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
            if name == "deepseek_v3"
            else {}
        ),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(
    scope="module",
    params=["glm4_moe", "deepseek_v3"],
)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, SglangEngine]]:
    root = tmp_path_factory.mktemp("drafting")
    folder = write_model(root / "model", request.param)
    found = {
        steps: SglangEngine(
            EngineSpec(
                name=f"engine-{steps}",
                model_path=str(folder),
                draft_tokens=steps,
                max_total_tokens=CACHED,
            ),
            root / f"{steps}.log",
        )
        for steps in STEPS
    }
    try:
        for engine in found.values():
            engine.start()
        for engine in found.values():
            engine.wait_ready(300.0)
        yield found
    finally:
        for engine in found.values():
            engine.stop()


def answers(engine: SglangEngine, sampling: SamplingConfig, length: int = 24) -> list[Any]:
    return engine.generate(PROMPTS, sampling, length)


@pytest.mark.full
def test_greedy_text_is_the_same(engines: dict[int, SglangEngine]) -> None:
    plain = answers(engines[0], SamplingConfig(temperature=0.0))
    assert engines[0].take_drafts() == {}
    for steps in STEPS[1:]:
        engines[steps].take_drafts()
        drafted = answers(engines[steps], SamplingConfig(temperature=0.0))
        for one, other in zip(plain, drafted, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert len(other.token_ids) == 24
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        found = engines[steps].take_drafts()
        assert 0 < found["accepted_drafts"] < 1
        assert 1 < found["tokens_per_pass"] < 1 + steps
        depths = [found.pop(f"accepted_drafts/depth_{k}", 0.0) for k in range(1, steps + 1)]
        assert found.keys() == {"accepted_drafts", "tokens_per_pass"}
        if steps > 1:
            assert depths == sorted(depths, reverse=True) and depths[0] < 1
            assert sum(depths) == pytest.approx(steps * found["accepted_drafts"])
            assert sum(depths) == pytest.approx(found["tokens_per_pass"] - 1)


@pytest.mark.full
def test_log_probs_of_sampled_tokens_are_those_of_the_model(
    engines: dict[int, SglangEngine], tmp_path: Path
) -> None:
    """What one engine samples with drafts, the other scores without: as prompts of one more
    token."""
    sampling = SamplingConfig(temperature=0.7)
    found = answers(engines[3], sampling, 8)
    assert {len(one.token_ids) for one in found} == {8}
    model = Path(engines[0].spec.model_path)
    expected = scores(model, [(p, list(c.token_ids)) for p, c in zip(PROMPTS, found, strict=True)])
    for one, scored in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.log_probs, scored, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("steps", STEPS)
def test_the_planner_counts_the_cache_that_an_engine_allocates(
    engines: dict[int, SglangEngine], steps: int
) -> None:
    """The model's, and that of the head that drafts."""
    engine = engines[steps]
    line = r"KV Cache is allocated\..*#tokens: (\d+),(.*)"
    logged = re.findall(line, Path(engine.log_path).read_text())
    sizes = [float(size) for _, one in logged for size in re.findall(r"size: ([0-9.]+) GB", one)]
    assert len(logged) == (2 if steps else 1)
    [tokens] = {int(number) for number, _ in logged}  # fewer than asked for if memory is short
    hf = json.loads((Path(engine.spec.model_path) / "config.json").read_text())
    planned, alone = (
        Engine(decoder_of(hf, mtp=mtp), EngineShape(), DEVICES["H100"], kv_item=4).kv_token
        for mtp in (steps > 0, False)
    )
    rounding = 0.005 * len(sizes) + 1e-4
    assert planned * tokens / 2**30 == pytest.approx(sum(sizes), abs=rounding)
    assert (planned > alone) == (steps > 0)
    if steps:
        assert (planned - alone) * tokens / 2**30 > rounding


def test_syncs_bring_the_head_as_a_cold_start_does(tmp_path: Path) -> None:
    """From two pipeline stages, of which the last one has the head, to an engine of two ranks. Both
    of its models are in the checksum, and the planner counts the bytes of both."""
    hf = {**FAMILIES["glm4_moe"], "num_nextn_predict_layers": 1, "vocab_size": 384}
    planned = Engine(decoder_of(hf, mtp=True), EngineShape(2), DEVICES["H100"], item=4)
    world = SyncWorld(
        hf,
        {"ranks": 2, "pipeline": 2},
        [{"tensor": 2, "speculative": SpeculativeConfig("mtp", 2)}],
        tmp_path,
    )
    try:
        assert "proven" in world.plan_line and "no unused tensors" in world.plan_line
        client = world.client(0, 60.0)
        checksums = []
        for seed in (1, 2):
            report = world.sync(world.train(seed))
            assert report.stale == {}
            assert report.nbytes == 2 * planned.weights  # the vocabulary needs no padding
            checksums.append(weights_checksum(client))
            assert world.difference(0, seed) <= FACTOR
            load_weights_from_disk(client, str(world.exported(seed)))
            assert weights_checksum(client) == checksums[-1]
        head = tmp_path / "head"
        copytree(world.exported(2), head)
        tensors = load_file(head / "model.safetensors")
        tensors[f"model.layers.{world.model['num_hidden_layers']}.eh_proj.weight"][0, 0] += 1
        save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
        load_weights_from_disk(client, str(head))
        assert len({*checksums, weights_checksum(client)}) == 3
    finally:
        world.close()


def scores(model: Path, rows: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """Log-probs by transformers at the temperature of the test."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt, response in rows:
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        chosen = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        found.append(chosen.numpy())
    return found
