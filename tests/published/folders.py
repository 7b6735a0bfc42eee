"""`published_folder` writes a tiny model as its family publishes one; `break_folder` spoils it as
downloads are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.published.configs import CONFIGS, GENERATION
from tests.published.tensors import tensors_of, write_shards
from tests.published.tokenizers import FORMS, write_tokenizer

FAMILIES = tuple(CONFIGS)
FAULTS = (
    "missing-shard",
    "cut-shard",
    "missing-entry",
    "missing-index",
    "lfs-pointer",
    "incomplete",
)
MARKER = "code-has-run"

_SHARDS = {"qwen2.5": 1, "qwen3": 1}
_SHARD_NAMES = {
    "deepseek-v3": "model-{number:05d}-of-{count:06d}.safetensors",
    "moonlight": "model-{number}-of-{count}.safetensors",
    "kimi-k2": "model-{number}-of-{count}.safetensors",
}
_CODE = {
    "deepseek-v3": ("configuration_deepseek.py", "modeling_deepseek.py", "inference/model.py"),
    "moonlight": ("configuration_deepseek.py", "modeling_deepseek.py", "tokenization_moonshot.py"),
    "kimi-k2": ("configuration_deepseek.py", "modeling_deepseek.py", "tokenization_kimi.py"),
}
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n"


def published_folder(
    family: str, folder: Path, seed: int = 0, *, shards: int | None = None, **config: Any
) -> Path:
    """Write a model folder as the family's publisher lays it out: every file of its kind, under its
    name.

    Code files leave a mark when they are run (`code_ran`). Weights are bfloat16, or fp8 with scales
    for DeepSeek-V3 and Kimi-K2. GLM-4.5 and DeepSeek-V3 have a layer for multi-token prediction
    behind the others, Qwen3 has an `lm_head.weight` beside tied embeddings.

    Args:
        family: one of `FAMILIES`.
        folder: made when it is missing.
        seed: of the weights.
        shards: files of weights; one has no index. None: 1 for the small dense models, 3 otherwise.
        config: fields of config.json to replace; the tensors follow.
    """
    folder.mkdir(parents=True, exist_ok=True)
    form = FORMS[family]
    specials = write_tokenizer(family, folder)
    stops = [specials[token] for token in form.stops]
    first = {"bos_token_id": specials.get(form.bos or "")} if form.bos else {}
    several = family in ("llama-3.1", "glm-4.5")
    named = {**first, "eos_token_id": stops if several else specials[form.eos]}
    if family == "glm-4.5":
        named["pad_token_id"] = specials["<|endoftext|>"]
    whole = {**CONFIGS[family], "vocab_size": form.rows, **named, **config}
    _write_json(folder / "config.json", whole)
    ends = {"eos_token_id": stops if len(stops) > 1 else stops[0]}
    _write_json(folder / "generation_config.json", {**GENERATION[family], **first, **ends})
    count = _SHARDS.get(family, 3) if shards is None else shards
    name = _SHARD_NAMES.get(family, "model-{number:05d}-of-{count:05d}.safetensors")
    write_shards(folder, tensors_of(whole, seed, extra_head=family == "qwen3"), count, name)
    _write_others(family, folder)
    return folder


def code_ran(folder: Path) -> bool:
    """Whether any of the folder's code files has been run."""
    return any(folder.rglob(MARKER))


def break_folder(folder: Path, fault: str) -> Path:
    """Spoil a folder as an interrupted or wrong download does; returns the file that is at fault.

    Args:
        fault: one of `FAULTS`. missing-entry takes a tensor out of the index, the others concern
            the last shard.
    """
    index = folder / "model.safetensors.index.json"
    last = sorted(folder.glob("*.safetensors"))[-1]
    if fault == "missing-entry":
        content = json.loads(index.read_text())
        del content["weight_map"]["model.norm.weight"]
        _write_json(index, content)
        return index
    if fault == "missing-index":
        index.unlink()
        return index
    data = last.read_bytes()
    last.unlink()
    if fault == "cut-shard":
        last.write_bytes(data[: len(data) // 2])
    elif fault == "lfs-pointer":
        last.write_text(_POINTER.format(digest="0" * 64, size=len(data)))
    elif fault == "incomplete":  # as `hf download --local-dir` leaves it when it is interrupted
        cache = folder / ".cache" / "huggingface" / "download"
        cache.mkdir(parents=True)
        (cache / f"{last.name}.0123abcd.incomplete").write_bytes(data[: len(data) // 2])
    elif fault != "missing-shard":
        raise ValueError(f"no fault {fault!r}; one of {', '.join(FAULTS)}")
    return last


def _write_others(family: str, folder: Path) -> None:
    """What lies beside: notes, licence, code, and weights in other forms."""
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n# {family}\n")
    (folder / "LICENSE").write_text("The licence of the model.\n")
    for name in _CODE.get(family, ()):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"import pathlib\n\npathlib.Path({str(folder / MARKER)!r}).touch()\n")
    if family == "llama-3.1":
        (folder / "original").mkdir(exist_ok=True)
        (folder / "original" / "consolidated.00.pth").write_bytes(
            b"PK\x03\x04 weights in another form"
        )
        _write_json(folder / "original" / "params.json", {"dim": 64, "n_layers": 2})
    elif family == "mixtral":
        (folder / "consolidated.00.pt").write_bytes(b"PK\x03\x04 weights in another form")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))
