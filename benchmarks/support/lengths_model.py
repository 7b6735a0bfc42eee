"""Creation of a model folder whose sampled responses have a chosen length distribution, in any
engine and without patching its sampler.

The embedding of a token encodes the phase of a response, the blocks hardly change it (their initial
outputs are small), and the output layer maps it to the probabilities of the next phase. A response
passes through one of several branches with two phases each, so its length is distributed as a
mixture of sums of two geometric variables, which is close to log-normal.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.models import family_of
from hybridflow.models.weights import RandomWeights

CHARACTERS = string.digits + "+=" + string.ascii_letters[:48]
_FIRST = 3 + 12  # first id that a response uses
_TOKENS = 4  # ids per phase
_EOS = 1
_LOGIT = 20.0
_SIZE = 5.0
# Log lengths of the branches as normal quantiles, with their shares. The two phases of a branch
# (digamma 0.423, trigamma 0.645) contribute the rest of the spread.
_QUANTILES = (
    (-1.4, 0.12),
    (-0.7, 0.2),
    (0.0, 0.3),
    (0.7, 0.22),
    (1.4, 0.1),
    (2.55, 0.06),
)
_SPREAD = 0.63
_SHIFT = 0.54


def write(folder: Path, sizes: dict[str, Any], median: float | None) -> None:
    """Write the folder.

    Args:
        folder: an existing, empty folder.
        sizes: a qwen3 config.json without the fields of the tokenizer.
        median: median length in tokens; the 99th percentile is about ten times as large. None means
            that no response ends before its limit.
    """
    write_character_tokenizer(folder, CHARACTERS)
    tokens = {"eos_token_id": _EOS, "pad_token_id": 0, "bos_token_id": None}
    config = {**sizes, **tokens, "vocab_size": 3 + len(CHARACTERS)}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = family_of(config).tensors()
    source = RandomWeights(shapes, seed=1, std=0.01)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = source.read(name, (0,) * len(shape), shape).clone()
    embedding = tensors["model.embed_tokens.weight"]
    output = tensors["lm_head.weight"]
    # the last norm scales a single large component to the square root of the hidden size
    scale = 1.0 / math.sqrt(int(sizes["hidden_size"]))
    embedding[:_FIRST, 0] = _SIZE
    for branch, (quantile, share) in enumerate(_QUANTILES):
        leave = 1e-9
        if median is not None:
            leave = min(0.9, math.exp(_SHIFT - _SPREAD * quantile) / median)
        odds = math.log(leave / (1 - leave))
        start = _FIRST + 2 * branch * _TOKENS
        first = slice(start, start + _TOKENS)
        second = slice(start + _TOKENS, start + 2 * _TOKENS)
        for phase, rows in enumerate((first, second), 1 + 2 * branch):
            embedding[rows, phase] = _SIZE
            output[rows, phase] = scale * _LOGIT
        output[first, 0] = scale * (_LOGIT + math.log(share))
        output[second, 1 + 2 * branch] = scale * (_LOGIT + odds)
        output[_EOS, 2 + 2 * branch] = scale * (_LOGIT + math.log(_TOKENS) + odds)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
