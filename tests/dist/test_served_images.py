"""Prompts with images in a real SGLang engine that gets its vision tower from a trainer.

The oracle is transformers' modules on a folder written from the same tensors, and SGLang's own
checksum after loading that folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.config.schema import SamplingConfig
from hybridflow.data.image_tokens import ImageTokens
from hybridflow.engines.base import Completion, PromptImages, TokenRequests, prompt_images
from hybridflow.engines.hf.engine import checkpoint_tensors
from hybridflow.errors import EngineError
from hybridflow.models import family_of
from hybridflow.models.causal import allocate, causal_on_meta
from tests.dist.cases.vision import batch_with_images
from tests.dist.harness.sync_senders import tensors_of
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import load_weights_from_disk, weights_checksum
from tests.models import IMAGE_TOKEN, VISIONS

pytestmark = pytest.mark.slow
BATCH = batch_with_images(5)
PROMPTS = [row.tolist() for row in BATCH.jagged("prompt_ids")]
IMAGES = prompt_images(BATCH)
TOKENS = ImageTokens(IMAGE_TOKEN, 2)
# SGLang pads experts to multiples of 32 on CPUs
_MIXTURE = VISIONS["qwen3_vl_moe"]
MODELS = {
    "qwen3_vl": VISIONS["qwen3_vl"],
    "qwen3_vl_moe": {
        **_MIXTURE,
        "text_config": {**_MIXTURE["text_config"], "moe_intermediate_size": 32},
        # its class adds three features, whatever the config says
        "vision_config": {**_MIXTURE["vision_config"], "deepstack_visual_indexes": [0, 1, 2]},
    },
}
BOUND = 1e-4
PATIENCE_S = 240.0
MOST = 200


@pytest.fixture(
    scope="module",
    params=[("qwen3_vl", [1]), pytest.param(("qwen3_vl_moe", [2]), marks=pytest.mark.full)],
    ids=lambda param: param[0],
)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SyncWorld]:
    kind, engines = request.param
    shape = {"ranks": 2, "tensor": 2}
    built = SyncWorld(MODELS[kind], shape, engines, tmp_path_factory.mktemp("images"))
    try:
        yield built
    finally:
        built.close()


def model_of(world: SyncWorld, seed: int) -> Any:
    """transformers' model with the weights of a seed."""
    weights = tensors_of(world.model, seed)
    model = causal_on_meta(family_of(world.model), torch.float32)
    allocate(model, torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in checkpoint_tensors(model):
            tensor.copy_(weights.pop(name))
    assert not weights
    return model.eval()


@torch.no_grad()
def log_probs(model: Any, prompt: Sequence[int], answer: Sequence[int], images: Any) -> Any:
    """Log-probs [t, v] of an answer's tokens; image tokens among them are text, which
    transformers' own forward pass does not provide for."""
    ids = np.array([*prompt, *answer])
    places = TOKENS.places(ids, images.grids, more=True)
    embedded = model.get_input_embeddings()(torch.tensor(ids)[None])
    features = {}
    if len(places):
        pixels = torch.tensor(images.pixels)
        seen = model.model.get_image_features(pixels, torch.tensor(images.grids), return_dict=True)
        embedded[0, places] = torch.cat(list(seen.pooler_output))
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, places] = True
        deep = [torch.cat(list(one)) for one in seen.deepstack_features]
        features = {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
    axes = torch.from_numpy(TOKENS.axes(len(ids), places, images.grids))
    hidden = model.model.language_model(
        inputs_embeds=embedded, position_ids=axes[:, None], use_cache=False, **features
    ).last_hidden_state
    return model.lm_head(hidden)[0, len(prompt) - 1 : -1].log_softmax(-1)


def check(
    prompt: Sequence[int],
    answer: Completion,
    images: PromptImages,
    models: dict[str, Any],
    before: Sequence[int] = (),
) -> None:
    """Every token has the log-prob of the weights that sampled it."""
    tokens = np.asarray(answer.token_ids).tolist()
    for span in answer.weight_versions:
        whole = log_probs(models[span.version], prompt, [*before, *tokens], images)[len(before) :]
        chosen = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        own = slice(span.start, span.end)
        found = torch.tensor(np.asarray(answer.log_probs))[own]
        torch.testing.assert_close(found, chosen[own], atol=BOUND, rtol=0)


def generate(world: SyncWorld, prompts: Any, most: int, images: Any) -> list[Completion]:
    found: list[Completion] = world.client(0, 60.0).generate(
        prompts, SamplingConfig(), most, images=images
    )
    return found


def test_answers_follow_the_images_and_each_version_of_the_tower(world: SyncWorld) -> None:
    client = world.client(0)
    # the same tokens with another image, and a prompt's samples
    other = PromptImages(IMAGES[0].pixels[::-1].copy(), IMAGES[0].grids)
    prompts = [*PROMPTS, *PROMPTS, PROMPTS[0]]
    images = [*IMAGES, *IMAGES, other]
    for seed in (1, 2):
        assert world.sync(world.train(seed)).stale == {}
        assert "no unused tensors" in world.plan_line
        models = {str(world.version): model_of(world, seed)}
        for prompt, answer, own in zip(
            prompts, generate(world, prompts, 5, images), images, strict=True
        ):
            check(prompt, answer, own, models)
    streamed = weights_checksum(client)
    load_weights_from_disk(client, str(world.exported(2)))
    assert weights_checksum(client) == streamed


def test_requests_go_on_with_a_new_tower(world: SyncWorld) -> None:
    """A sync suspends them, and their keys and values are computed again."""
    world.sync(world.train(3))
    models = {str(world.version): model_of(world, 3)}
    with ThreadPoolExecutor(1) as pool:
        client = world.workers[0].supervisor.engine.client
        found: dict[int, Completion] = {}
        asked = client.ask(
            TokenRequests(PROMPTS, SamplingConfig(), [MOST] * len(PROMPTS), [], images=IMAGES),
            found.__setitem__,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not all(map(len, asked.answers)):
            assert time.monotonic() < deadline, "not every prompt has a token"
            time.sleep(0.005)
        version = world.train(4)
        assert pool.submit(world.sync, version).result(PATIENCE_S).stale == {}
        models[str(version)] = model_of(world, 4)
        asked.done.result(PATIENCE_S)
    spans = [len(one.weight_versions) for one in found.values()]
    assert max(spans) == 2, spans
    for number, answer in found.items():
        check(PROMPTS[number], answer, IMAGES[number], models)


def test_an_answer_goes_on_elsewhere_with_its_images(world: SyncWorld) -> None:
    """Its tokens are resent after the prompt; image tokens among them are text."""
    world.sync(world.train(5))
    models = {str(world.version): model_of(world, 5)}
    begun = [7, IMAGE_TOKEN, IMAGE_TOKEN, 9]
    answers = generate(world, [[*prompt, *begun] for prompt in PROMPTS], 4, IMAGES)
    for prompt, answer, images in zip(PROMPTS, answers, IMAGES, strict=True):
        check(prompt, answer, images, models, begun)


def test_an_aborted_request_keeps_its_tokens_and_the_others_go_on(world: SyncWorld) -> None:
    world.sync(world.train(6))
    models = {str(world.version): model_of(world, 6)}
    client = world.workers[0].supervisor.engine.client
    found: dict[int, Completion] = {}
    asked = client.ask(
        TokenRequests(PROMPTS, SamplingConfig(), [MOST] * len(PROMPTS), [], images=IMAGES),
        found.__setitem__,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(len, asked.answers)):
        assert time.monotonic() < deadline, "not every prompt has a token"
        time.sleep(0.005)
    asked.abort([0])
    asked.done.result(PATIENCE_S)
    reasons = [found[number].finish_reason for number in range(len(PROMPTS))]
    assert reasons[0] == "abort" and "abort" not in reasons[1:]
    for number, answer in found.items():
        check(PROMPTS[number], answer, IMAGES[number], models)


def test_a_prompt_without_the_tokens_of_its_images_is_refused(world: SyncWorld) -> None:
    """The engine goes on serving others."""
    world.sync(world.train(7))
    with pytest.raises(EngineError, match="a prompt has 0 image tokens"):
        generate(world, [[3, 4, 5]], 2, [IMAGES[0]])
    assert len(generate(world, PROMPTS, 2, IMAGES)) == len(PROMPTS)


def test_the_harness_sees_a_changed_image(world: SyncWorld, tmp_path: Path) -> None:
    """What the bound must find."""
    world.sync(world.train(8))
    models = {str(world.version): model_of(world, 8)}
    [answer] = generate(world, PROMPTS[:1], 5, IMAGES[:1])
    changed = PromptImages(IMAGES[0].pixels * 1.01, IMAGES[0].grids)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(PROMPTS[0], answer, changed, models)
