"""The engine `hf` with images: every answer is transformers' own for its prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.config.schema import SamplingConfig
from hybridflow.engines.base import PromptImages, prompt_images
from tests.dist.cases.vision import batch_with_images
from tests.models import IMAGE_TOKEN, VISIONS
from tests.unit.engines.hf_engines import engine_of, fill

GREEDY = SamplingConfig(temperature=0.0)


def expected(engine: Any, prompt: list[int], answer: list[int], images: PromptImages) -> Any:
    """Logits [t, v] of the answer's tokens, in one forward pass over the row."""
    ids = torch.tensor([prompt + answer])
    kinds = torch.zeros_like(ids)
    kinds[0, : len(prompt)] = torch.tensor(prompt) == IMAGE_TOKEN
    seen = {}
    if len(images.grids):
        seen = {
            "pixel_values": torch.from_numpy(images.pixels.copy()),
            "image_grid_thw": torch.from_numpy(images.grids.copy()),
            "mm_token_type_ids": kinds,
        }
    engine._model.model.rope_deltas = None
    with torch.no_grad():
        return engine._model(ids, use_cache=False, **seen).logits[0, len(prompt) - 1 : -1]


@pytest.fixture(scope="module", params=VISIONS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = engine_of(VISIONS[request.param], Path(tmp_path_factory.mktemp("engine")))
    fill(made, 0.2)
    # transformers counts the image tokens of a whole row, so no answer may have one
    made._model.lm_head.weight[IMAGE_TOKEN] = 0.0
    return made


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 3])
def test_answers_follow_the_images_of_their_prompt(engine: Any, samples: int) -> None:
    batch = batch_with_images(5)
    prompts = [row.tolist() for row in batch.jagged("prompt_ids")]
    images = prompt_images(batch)
    # the same tokens with another image
    other = PromptImages(images[0].pixels[::-1].copy(), images[0].grids)
    prompts = [one for one in [*prompts, prompts[0]] for _ in range(samples)]
    images = [one for one in [*images, other] for _ in range(samples)]
    found = engine.generate(prompts, GREEDY, 5, images=images)
    for prompt, done, own in zip(prompts, found, images, strict=True):
        logits = expected(engine, prompt, done.token_ids, own)
        assert done.token_ids == logits.argmax(-1).tolist()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.log_probs), chosen, atol=1e-5, rtol=0)
    assert not np.allclose(found[0].log_probs, found[-1].log_probs, atol=1e-3)


def test_prompts_without_images_are_answered_between_others(engine: Any) -> None:
    batch = batch_with_images(6)
    before = engine.generate([[3, 4, 5]] * 2, GREEDY, 4)
    prompts = [row.tolist() for row in batch.jagged("prompt_ids")]
    engine.generate(prompts, GREEDY, 4, images=prompt_images(batch))
    assert engine.generate([[3, 4, 5]] * 2, GREEDY, 4) == before
    none = PromptImages(np.empty((0, 96), np.float32), np.empty((0, 3), np.int64))
    logits = expected(engine, [3, 4, 5], before[0].token_ids, none)
    assert before[0].token_ids == logits.argmax(-1).tolist()
