"""Images in requests to SGLang: their encoding, and their reception in the server's processes, as
part of the plugin.

The engine receives the patches that the trainer computes log-probs from, so no image is resized or
normalised twice. A request body has a table of its distinct images, and for each prompt the images'
numbers in the table: the samples of a prompt share its images. Both are JSON inside a string,
because SGLang's schema of request bodies (sglang/srt/entrypoints/api_contract.py) has no field for
patches.

SGLang's own image processors decode and resize images with torchvision, tokenise the prompt again,
and treat every image token as the place of an image, including those that the policy sampled. A
prompt from HybridFlow has its final tokens, and its images arrive as patches (`image_data`), so
nothing is left to process: the places and the positions of the images follow from their grids.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from hybridflow.config.model_config import VISION_TYPES
from hybridflow.data.image_tokens import ImageTokens
from hybridflow.engines.base import PromptImages

if TYPE_CHECKING:
    import torch

_MARK = "patches:"  # beginning of the string; others are files, addresses or data URIs
_IMAGES = "images"  # the table: `_GRID`, `_DIGEST` and base64 `_PATCHES` of each image
_ROWS = "rows"
_DTYPE = "dtype"
_GRID = "grid"
_DIGEST = "digest"
_PATCHES = "patches"
# PromptImages are float32; an engine's tower casts patches to its own dtype
DTYPES = ("float32", "bfloat16")
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_SCHEDULER = "sglang.srt.managers.scheduler"


@dataclass(frozen=True)
class ImagePatches:
    """One image of a prompt, as received.

    Attributes:
        patches: [p, c].
        grid: frames, rows and columns of the patches.
        digest: 32 bytes; equal for equal images.
    """

    patches: torch.Tensor
    grid: tuple[int, int, int]
    digest: bytes


def encode(images: Sequence[PromptImages], dtype: str) -> str:
    """Return the value of `image_data` in the body of a request.

    Args:
        images: the images of each prompt.
        dtype: one of `DTYPES`; the dtype of the engine's vision tower.
    """
    numbers: dict[str, int] = {}
    table: list[dict[str, Any]] = []
    rows: list[list[int]] = []
    for place, one in enumerate(images):
        if place and one.equals(images[place - 1]):
            rows.append(rows[-1])
            continue
        row: list[int] = []
        end = 0
        for grid in one.grids.tolist():
            start = end
            end += grid[0] * grid[1] * grid[2]
            data = _bytes_of(one.pixels[start:end], dtype)
            digest = sha256(repr((grid, dtype)).encode() + data).hexdigest()
            if digest not in numbers:
                numbers[digest] = len(table)
                patches = base64.b64encode(data).decode()
                table.append({_GRID: grid, _DIGEST: digest, _PATCHES: patches})
            row.append(numbers[digest])
        rows.append(row)
    return _MARK + orjson.dumps({_IMAGES: table, _ROWS: rows, _DTYPE: dtype}).decode()


def is_encoded(image_data: Any) -> bool:
    """Return True if this `image_data` was made by `encode`."""
    return isinstance(image_data, str) and image_data.startswith(_MARK)


def decode(image_data: str) -> list[list[ImagePatches]]:
    """Return the images of each prompt.

    Raises:
        ValueError: the dtype is none of `DTYPES`, or the data does not match the grids.
    """
    import torch

    given = orjson.loads(image_data.removeprefix(_MARK))
    if given[_DTYPE] not in DTYPES:
        raise ValueError(f"dtype {given[_DTYPE]!r} is not one of {', '.join(DTYPES)}")
    dtype = getattr(torch, given[_DTYPE])
    table = []
    for number, one in enumerate(given[_IMAGES]):
        frames, rows, columns = one[_GRID]
        data = bytearray(base64.b64decode(one[_PATCHES], validate=True))
        values = torch.frombuffer(data, dtype=dtype)
        count = frames * rows * columns
        if not count or len(values) % count:
            raise ValueError(
                f"image {number} has {len(values)} values, which are not {count} equal patches"
            )
        digest = bytes.fromhex(one[_DIGEST])
        table.append(ImagePatches(values.view(count, -1), (frames, rows, columns), digest))
    return [[table[number] for number in row] for row in given[_ROWS]]


def _bytes_of(pixels: np.ndarray, dtype: str) -> bytes:
    values = np.ascontiguousarray(pixels, np.float32)
    if dtype == "float32":
        return values.tobytes()
    import torch

    return torch.tensor(values).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def receive_images() -> None:
    """Patch the server to accept images from HybridFlow, and no others."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        (
            "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
            decode_images,
            HookType.BEFORE,
        ),
        (f"{_TOKENIZER}.import_processors", leave_out_processors, HookType.REPLACE),
        (f"{_TOKENIZER}.get_processor_wrapper", own_tokenizer, HookType.REPLACE),
        (f"{_TOKENIZER}.get_mm_processor", processor_of, HookType.AROUND),
        (f"{_SCHEDULER}.import_processors", leave_out_processors, HookType.REPLACE),
        (f"{_SCHEDULER}.get_processor", tokenizer_alone, HookType.REPLACE),
        (f"{_SCHEDULER}.get_mm_processor", processor_of, HookType.AROUND),
        ("sglang.srt.managers.tp_worker.get_processor", tokenizer_alone, HookType.REPLACE),
        (
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
            "._compute_mrope_positions_extend",
            extend_positions,
            HookType.BEFORE,
        ),
    ):
        HookRegistry.register(target, hook, kind)


class PatchProcessor:
    """SGLang's interface of image processors, for the models whose image tokens `ImageTokens`
    describes."""

    prefer_tokenized_input = True
    mm_tokens = None

    def __init__(self, hf_config: Any) -> None:
        vision = hf_config.vision_config
        self.tokens = ImageTokens(int(hf_config.image_token_id), int(vision.spatial_merge_size))

    async def process_mm_data_async(
        self, image_data: Sequence[ImagePatches], input_text: Sequence[int], **_: Any
    ) -> Any:
        """Return SGLang's description of a prompt with images.

        Args:
            image_data: the prompt's images.
            input_text: the prompt's tokens, with one image token for each square of patches. Later
                image tokens are text.

        Raises:
            ValueError: an image is not from HybridFlow, or the tokens do not match the images.
        """
        import torch
        from sglang.srt.managers.schedule_batch import (
            Modality,
            MultimodalDataItem,
            MultimodalProcessorOutput,
        )

        if not all(isinstance(one, ImagePatches) for one in image_data):
            raise ValueError(
                "this server accepts images only as patches, with a prompt's token ids"
            )
        ids = np.asarray(input_text, np.int64)
        grids = np.array([one.grid for one in image_data], np.int64)
        places = self.tokens.places(ids, grids, more=True)
        bounds = np.concatenate([[0], self.tokens.counts(grids).cumsum()]).tolist()
        items = []
        for one, (start, end) in zip(image_data, pairwise(bounds), strict=True):
            item = MultimodalDataItem(
                modality=Modality.IMAGE,
                offsets=[(int(places[start]), int(places[end - 1]))],
                feature=one.patches,
                model_specific_data={"image_grid_thw": torch.tensor([one.grid])},
            )
            item.set_identity(one.digest)
            items.append(item)
        axes = self.tokens.axes(len(ids), places, grids)
        tokens = ids.tolist()
        return MultimodalProcessorOutput(
            input_ids=tokens,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(tokens, items),
            mm_items=items,
            im_token_id=self.tokens.token,
            mrope_positions=torch.from_numpy(axes),
            mrope_position_delta=torch.tensor([[int(axes.max()) + 1 - len(ids)]]),
        )

    def clear_preprocess_cache(self) -> None:
        """Do nothing, because nothing is cached."""

    def shutdown(self) -> None:
        """Do nothing, because there are no workers."""


def decode_images(request: Any) -> None:
    """Replace the encoded images of a request by those of each prompt."""
    if is_encoded(request.image_data):
        request.image_data = decode(request.image_data)


def leave_out_processors(*_: Any, **__: Any) -> None:
    """Skip the import of SGLang's image processors, which import torchvision and most models."""


def own_tokenizer() -> Any:
    """Return the tokenizer in place of transformers' processor, whose image and video processors
    need torchvision. None if the server does not tokenise."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    serving = get_serving()
    return None if serving.skip_tokenizer_init else get_tokenizer(serving.tokenizer_path)


def tokenizer_alone(*_: Any, **__: Any) -> Any:
    """Return the tokenizer in place of transformers' processor, with that function's signature."""
    return own_tokenizer()


def processor_of(original: Callable[..., Any], hf_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the image processor of a model."""
    if hf_config.model_type in VISION_TYPES:
        return PatchProcessor(hf_config)
    return original(hf_config, *args, **kwargs)


def extend_positions(_: Any, __: Any, batch: Any) -> None:
    """Append the positions of generated tokens to those of prompts with images, for requests that
    are computed again after they were suspended.

    SGLang has positions only for the prompt, and would compute the generated tokens with too few
    (sglang/srt/model_executor/forward_batch_info.py:1691).
    """
    import torch

    lengths = [int(x) + int(y) for x, y in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    for images, length in zip(batch.multimodal_inputs, lengths, strict=True):
        known = None if images is None else images.mrope_positions
        if known is not None and known.shape[1] < length:
            first = known.shape[1] + int(images.mrope_position_delta.item())
            more = first + torch.arange(length - known.shape[1], dtype=known.dtype)
            images.mrope_positions = torch.cat([known, more.to(known.device).repeat(3, 1)], dim=1)
