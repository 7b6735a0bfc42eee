"""Weights of a published size that take no room: the header of a safetensors file, and a hole of
the right length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from hybridflow.models import family_of


def whole_size(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors of a model in bfloat16, terabytes of which nothing
    lies on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    header = dict[str, Any]()
    end = 0
    for name, shape in family_of(config).tensors().items():
        begin = end
        end = end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with file.open("r+b") as opened:
        opened.truncate(8 + len(text) + end)
    return folder
