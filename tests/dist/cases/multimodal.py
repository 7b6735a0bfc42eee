"""A text model that is trained next to a vision tower: loaded from the folder by ranks, compared with
transformers' multimodal class, and exported by the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.dist.cases.families import LAYOUTS, batch_of_lengths, largest_difference
from tests.dist.harness.policies import policy_of

LENGTHS = [1, 3, 9, 17, 40, 2]


def run_cases(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """On each rank: every case [layout, folder] in order; the largest difference of log-probs from
    transformers'. Each exports the model, unchanged, to `folder`-LAYOUT."""
    from hybridflow.config.model_config import read_model_config
    from hybridflow.mcore.hf_export import export
    from hybridflow.mcore.model import load_weights
    from hybridflow.models.weights import SafetensorsFolder
    from tests.dist.harness.worlds import Worlds

    worlds = Worlds()
    found = []
    for layout, given in cases:
        folder = Path(given)
        ranks = list(range(1 if layout == "one process" else 2))
        if worlds.mine(ranks):
            with worlds.world(ranks):
                hf = read_model_config(folder / "config.json")
                policy = policy_of({**LAYOUTS[layout], "distributed_optimizer": False}, hf)
                load_weights(policy.stages, policy.family, SafetensorsFolder(folder))
                batch = batch_of_lengths(LENGTHS, hf["vocab_size"])
                found.append({"log_probs": largest_difference(policy, folder, batch)})
                out = folder.with_name(f"{folder.name}-{layout}")
                export(policy, out, hf, None, source=folder)
    worlds.finish()
    return found
