"""Folders of models."""

from __future__ import annotations

import json
from pathlib import Path

SIZES = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}


def model(folder: Path, **changed: object) -> Path:
    """A Hugging Face folder, as far as it is looked at here."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SIZES | changed))
    (folder / "model.safetensors").write_bytes(b"")
    return folder
