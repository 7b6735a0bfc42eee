"""Images in requests to SGLang: what is sent, how it is divided over HTTP requests, and what the
server makes of it."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.data.image_tokens import ImageTokens
from hybridflow.engines import token_stream
from hybridflow.engines.base import (
    Completion,
    Extras,
    PromptImages,
    TokenRequests,
    prompt_images,
)
from hybridflow.engines.sglang.engine import SglangStreams
from hybridflow.engines.sglang.images import (
    PatchProcessor,
    decode,
    decode_images,
    encode,
    extend_positions,
)
from hybridflow.engines.sglang.weight_receiver import forget_image_features
from hybridflow.engines.token_stream import Asked
from hybridflow.engines.vllm.client import VllmClient
from hybridflow.errors import EngineError
from hybridflow.workers.requests import EngineRequests
from tests.dist.cases.vision import batch_with_images
from tests.models import IMAGE_TOKEN

BATCH = batch_with_images(5)
PROMPTS = [row.tolist() for row in BATCH.jagged("prompt_ids")]
IMAGES = prompt_images(BATCH)
CONFIG = SimpleNamespace(
    image_token_id=IMAGE_TOKEN,
    model_type="qwen3_vl",
    vision_config=SimpleNamespace(spatial_merge_size=2),
)


def read(sent: str) -> Any:
    return json.loads(sent.removeprefix("patches:"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_prompt_gets_its_images_and_each_is_sent_once(dtype: str) -> None:
    sent = encode([*IMAGES, *IMAGES], dtype)
    assert len(read(sent)["images"]) == sum(len(one.grids) for one in IMAGES)
    received = decode(sent)
    assert received[: len(IMAGES)] == received[len(IMAGES) :]
    kind = getattr(torch, dtype)
    for given, row in zip(IMAGES, received, strict=False):
        assert [list(one.grid) for one in row] == given.grids.tolist()
        patches = torch.cat([one.patches for one in row]) if row else torch.empty(0, 96, dtype=kind)
        assert torch.equal(patches, torch.tensor(given.pixels).to(kind))


def test_the_same_patches_in_another_shape_are_another_image() -> None:
    pixels = np.zeros((8, 96), np.float32)
    wide, high = (PromptImages(pixels, np.array([grid])) for grid in ((1, 2, 4), (1, 4, 2)))
    sent = read(encode([wide, high, wide], "float32"))
    assert sent["rows"] == [[0], [1], [0]]
    assert len({one["digest"] for one in sent["images"]}) == 2


def test_patches_that_do_not_fill_their_grid_are_refused() -> None:
    sent = read(encode(IMAGES, "float32"))
    patches = base64.b64decode(sent["images"][0]["patches"])
    sent["images"][0]["patches"] = base64.b64encode(patches[:-4]).decode()
    with pytest.raises(ValueError, match="image 0 has 767 values, which are not 8 equal patches"):
        decode(f"patches:{json.dumps(sent)}")
    sent["dtype"] = "load"
    with pytest.raises(ValueError, match="dtype 'load' is not one of float32, bfloat16"):
        decode(f"patches:{json.dumps(sent)}")


def body_of(prompts: list[list[int]], images: list[PromptImages]) -> dict[str, Any]:
    asked = Asked(prompts, [{}] * len(prompts), Extras(), lambda *_: None, images)
    streams = SglangStreams("http://127.0.0.1:1", {}, "engine-0", 1.0, 8)
    return streams._body(asked, range(1, len(prompts)))


def test_a_body_has_the_final_tokens_and_the_images_of_its_own_prompts() -> None:
    body = body_of(PROMPTS, IMAGES)
    assert body["input_ids"] == PROMPTS[1:]
    assert body["image_data"] == encode(IMAGES[1:], "float32")
    assert "image_data" not in body_of(PROMPTS, [])


def test_a_request_is_bounded_by_the_bytes_of_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [one.pixels.nbytes for one in IMAGES]
    asked = Asked(PROMPTS, [{}] * len(PROMPTS), Extras(), lambda *_: None, IMAGES)
    assert list(token_stream._parts(asked, 3)) == [range(0, 3), range(3, 6), range(6, 8)]
    monkeypatch.setattr(token_stream, "_IMAGE_BYTES", max(sizes) - 1)
    parts = list(token_stream._parts(asked, 3))
    assert [number for part in parts for number in part] == list(range(8))
    for part in parts:
        total = sum(sizes[number] for number in part)
        assert len(part) <= 3 and (total < max(sizes) or sum(sizes[n] > 0 for n in part) == 1)
    largest = IMAGES[sizes.index(max(sizes))]
    samples = Asked([[3]] * 6, [{}] * 6, Extras(), lambda *_: None, [largest] * 4 + IMAGES[:2])
    assert list(token_stream._parts(samples, 8)) == [range(0, 4), range(4, 6)]
    assert list(token_stream._parts(samples, 3)) == [range(0, 3), range(3, 4), range(4, 6)]
    without = Asked(PROMPTS, [{}] * len(PROMPTS), Extras(), lambda *_: None)
    assert list(token_stream._parts(without, 5)) == [range(0, 5), range(5, 8)]


def test_other_servers_refuse_images() -> None:
    client = VllmClient("http://127.0.0.1:1", "key", name="engine-3")
    with pytest.raises(EngineError, match=r"engine-3.*does not receive images"):
        client.ask(TokenRequests(PROMPTS, None, [4] * 8, [], images=IMAGES), lambda *_: None)  # type: ignore[arg-type]


def test_an_engine_without_streams_gets_the_images_of_each_length() -> None:
    calls = []

    class Engine:
        spec = SimpleNamespace(name="engine-0")

        def generate(self, prompts: Any, *_: Any, images: Any) -> list[Completion]:
            calls.append((list(prompts), list(images)))
            return [Completion([], [], "stop", ())] * len(prompts)

    limits = [4, 9] * 4
    asked = TokenRequests(PROMPTS, None, limits, [], images=IMAGES)  # type: ignore[arg-type]
    under_way = EngineRequests()
    under_way.ask(Engine(), 0, list(range(len(PROMPTS))), asked)  # type: ignore[arg-type]
    under_way.wait(10)
    assert calls == [(PROMPTS[0::2], IMAGES[0::2]), (PROMPTS[1::2], IMAGES[1::2])]


# ---- the server


def processed(ids: list[int], images: PromptImages, dtype: str = "float32") -> Any:
    """What SGLang's scheduler gets for a prompt."""
    pytest.importorskip("sglang.srt.managers.schedule_batch", exc_type=ImportError)
    request = SimpleNamespace(image_data=encode([images], dtype))
    decode_images(request)
    [row] = request.image_data
    return asyncio.run(
        PatchProcessor(CONFIG).process_mm_data_async(
            image_data=row, input_text=ids, audio_data=None, request_obj=request
        )
    )


def test_the_server_places_images_as_the_trainer_does() -> None:
    """Image tokens that the policy sampled, here after the prompt, are text."""
    sampled = [5, IMAGE_TOKEN, IMAGE_TOKEN, 7]
    for prompt, images in zip(PROMPTS, IMAGES, strict=True):
        if not len(images.grids):
            continue
        ids = [*prompt, *sampled]
        found = processed(ids, images)
        assert found.input_ids == ids
        tokens = ImageTokens(IMAGE_TOKEN, 2)
        places = tokens.places(np.array(ids), images.grids, more=True)
        axes = tokens.axes(len(ids), places, images.grids)
        assert torch.equal(found.mrope_positions, torch.from_numpy(axes))
        assert int(found.mrope_position_delta) == axes.max() + 1 - len(ids)
        padded = np.array(found.padded_input_ids)
        changed = np.flatnonzero(padded != ids)
        assert changed.tolist() == places.tolist()
        covered = [np.arange(a, b + 1) for item in found.mm_items for a, b in item.offsets]
        assert np.concatenate(covered).tolist() == places.tolist()
        grids = torch.cat([item.image_grid_thw for item in found.mm_items])
        assert grids.tolist() == images.grids.tolist()


def test_prefixes_are_shared_by_equal_images_only() -> None:
    other = PromptImages(IMAGES[0].pixels[::-1].copy(), IMAGES[0].grids)
    one, same, different = (
        processed(PROMPTS[0], images).padded_input_ids for images in (IMAGES[0], IMAGES[0], other)
    )
    assert one == same != different


def test_tokens_that_do_not_fit_the_images_are_refused() -> None:
    with pytest.raises(ValueError, match="a prompt has 1 image tokens"):
        processed([3, IMAGE_TOKEN, 4], IMAGES[0])


def test_images_in_another_form_are_refused() -> None:
    processor = PatchProcessor(CONFIG)
    pytest.importorskip("sglang.srt.managers.schedule_batch", exc_type=ImportError)
    with pytest.raises(ValueError, match="only as patches"):
        asyncio.run(
            processor.process_mm_data_async(
                image_data=["data:image/png;base64,"],  # type: ignore[list-item]
                input_text=[3],
            )
        )


def test_a_suspended_request_has_positions_for_what_it_has_generated() -> None:
    images = next(one for one in IMAGES if len(one.grids))
    prompt = PROMPTS[IMAGES.index(images)]
    answer = [5, IMAGE_TOKEN, 6]
    short = processed(prompt, images)
    whole = processed([*prompt, *answer], images)
    for prefix in (0, 2):
        held = SimpleNamespace(
            mrope_positions=short.mrope_positions, mrope_position_delta=short.mrope_position_delta
        )
        batch = SimpleNamespace(
            prefix_lens=[0, prefix],
            extend_lens=[4, len(prompt) + len(answer) - prefix],
            multimodal_inputs=[None, held],
        )
        for _ in range(2):  # the second time, nothing is left to append
            extend_positions(None, None, batch)
            assert torch.equal(held.mrope_positions, whole.mrope_positions)


def test_features_of_an_old_tower_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = pytest.importorskip("sglang.srt.managers.mm_schedule", exc_type=ImportError)
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    monkeypatch.setattr(schedule, "embedding_cache", None)
    forget_image_features()  # before the server has allocated it
    schedule.init_mm_embedding_cache(1 << 20)
    assert schedule.embedding_cache.set(7, EmbeddingResult(embedding=torch.ones(2, 3)))
    forget_image_features()
    assert schedule.embedding_cache.get_single(7) is None
