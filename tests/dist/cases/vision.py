"""A vision-language model on each rank: rows with none, one and three images of different sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import OptimConfig
from tests.dist.cases.families import largest_difference, measure
from tests.dist.harness.policies import digest, policy_of, share_of
from tests.models import IMAGE_TOKEN, VISIONS

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tensor": 2},
    "TP2 SP": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
    "DP2": {},
    "EP2": {"expert": 2},
}
# (rows, columns) of patches of a row's images; the second half of the rows is text alone, so that a
# data-parallel rank and a micro-batch have no images
ROWS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((2, 4),),
    (),
    ((6, 2), (2, 2), (4, 6)),
    ((4, 4),),
    (),
    (),
    (),
    (),
)
MAX_TOKENS = 48


def batch_with_images(seed: int, rows: tuple[tuple[tuple[int, int], ...], ...] = ROWS) -> DataProto:
    """Random tokens around the images. A row without images may have the image token as any other,
    as if the policy had sampled it."""
    rng = np.random.default_rng(seed)
    prompts = []
    responses = []
    grids = []
    patches = []
    for images in rows:
        prompt = [*rng.integers(2, IMAGE_TOKEN, rng.integers(1, 6))]
        for high, wide in images:
            prompt += [49, *[IMAGE_TOKEN] * (high * wide // 4), 50]
            prompt += [*rng.integers(2, IMAGE_TOKEN, rng.integers(1, 4))]
        prompts.append(prompt)
        # transformers counts the image tokens of the whole row
        largest = IMAGE_TOKEN if images else 51
        responses.append([*rng.integers(2, largest, rng.integers(1, 7))])
        grids.append(np.array([(1, *grid) for grid in images], np.int64).reshape(-1, 3))
        patches.append(rng.normal(size=(sum(a * b for a, b in images), 3 * 2 * 4 * 4)))
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(prompts, np.int64),
            "response_ids": Jagged.from_rows(responses, np.int64),
            "pixel_values": Jagged.from_rows(patches, np.float32),
            "image_grid_thw": Jagged.from_rows(grids, np.int64),
        }
    )


def run_cases(cases: list[list[Any]], folder: str) -> list[dict[str, Any]]:
    """On each rank: every case [kind, layout, whether the tower is trained] in order; what was
    measured, on the rank that collects."""
    from hybridflow.config.model_config import with_tower
    from tests.dist.harness.worlds import Worlds

    worlds = Worlds()
    found = []
    for number, (kind, layout, is_trained) in enumerate(cases):
        ranks = list(range(1 if layout == "one process" else 2))
        if worlds.mine(ranks):
            with worlds.world(ranks):
                options = {"freeze_vision_tower": not is_trained}
                parallel = {**LAYOUTS[layout], "distributed_optimizer": False}
                policy = policy_of(parallel, with_tower(VISIONS[kind]), **options)
                result = measure(
                    policy,
                    VISIONS[kind],
                    Path(folder, str(number)),
                    batch_with_images(3),
                    is_trained,
                    MAX_TOKENS,
                )
                result["moved"] = _moved(policy, Path(folder, f"checkpoint{number}"))
            result["name"] = f"{kind}, {layout}, {'trained' if is_trained else 'frozen'}"
            found.append(result)
    worlds.finish()
    return found


def copy(folders: list[str]) -> list[float]:
    """Read each folder, with its tower, and export it unchanged to `folder`-copy, and to
    `folder`-alone as if the folder were gone; the largest differences of log-probs from
    transformers'."""
    from hybridflow.config.model_config import read_model_config, with_tower
    from hybridflow.mcore.hf_export import export
    from hybridflow.mcore.model import load_weights
    from hybridflow.models.weights import SafetensorsFolder

    found = []
    for given in folders:
        folder = Path(given)
        hf = with_tower(read_model_config(folder / "config.json"))
        policy = policy_of({"distributed_optimizer": False}, hf)
        load_weights(policy.stages, policy.family, SafetensorsFolder(folder))
        found.append(largest_difference(policy, folder, batch_with_images(3)))
        export(policy, folder.with_name(f"{folder.name}-copy"), hf, None, source=folder)
        export(policy, folder.with_name(f"{folder.name}-alone"), hf, None)
    return found


def _moved(policy: Any, folder: Path) -> dict[str, bool]:
    """Whether an update moves the language model and the tower, and whether a checkpoint brings both
    back as they were."""
    from hybridflow.mcore import checkpoint
    from hybridflow.workers.losses import sft_loss

    policy.set_optimizer(OptimConfig(lr=1e-2))
    policy.freeze_reference()
    checkpoint.save(policy, folder)
    before = digest(policy)
    policy.train_mini_batch(
        share_of(batch_with_images(4)),
        sft_loss,
        columns=(),
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        with_entropy=False,
    )
    after = digest(policy)
    with policy.as_reference():
        reference = digest(policy)
    checkpoint.load(policy, folder)
    changed = {name for name in before if before[name] != after[name]}
    return {
        "language model": any(".language_model." in name for name in changed),
        "tower": any(".visual." in name for name in changed),
        "reference": reference != before,
        "loaded": digest(policy) != before,
    }
