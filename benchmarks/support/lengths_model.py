"""A model folder whose sampled responses have lengths of our choosing, for any engine: no sampler is patched.

The embedding of a token says in which phase a response is, the blocks hardly change it (their outputs start small), and
the output layer turns it into the chances of the next phase. A response goes through one of several branches of two
phases each, so that its length is a mixture of sums of two geometric numbers, which is close to log-normal.
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
_FIRST, _TOKENS = 3 + 12, 4  # the first id that a response uses; ids of one phase
_EOS, _LOGIT, _SIZE = 1, 20.0, 5.0
# Spread of the branches' logarithms of length, in normal quantiles, with their shares: what the two phases of a branch
# (digamma 0.423, trigamma 0.645) lack of the whole.
_QUANTILES = ((-1.4, 0.12), (-0.7, 0.2), (0.0, 0.3), (0.7, 0.22), (1.4, 0.1), (2.55, 0.06))
_SPREAD, _SHIFT = 0.63, 0.54


def write(folder: Path, sizes: dict[str, Any], median: float | None, seed: int = 1) -> None:
    """Write the folder.

    Args:
        sizes: fields of a qwen3 config.json.
        median: of the lengths, in tokens, whose 99th percentile is about ten times as large; None: no response ends
            before its limit.
    """
    write_character_tokenizer(folder, CHARACTERS)
    config = {
        **sizes, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 3 + len(CHARACTERS),
        "eos_token_id": _EOS, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = family_of(config).tensors()
    source = RandomWeights(shapes, seed, 0.01)
    tensors = {name: source.read(name, (0,) * len(shape), shape).clone() for name, shape in shapes.items()}
    embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    scale = 1.0 / math.sqrt(int(sizes["hidden_size"]))  # the last norm makes one large component of this inverse
    embedding[:_FIRST, 0] = _SIZE
    for branch, (quantile, share) in enumerate(_QUANTILES):
        mean = 1e9 if median is None else math.exp(math.log(median) - _SHIFT + _SPREAD * quantile)
        leave = min(0.9, 1.0 / mean)
        for phase in range(2):
            number = 2 * branch + phase
            rows = slice(_FIRST + number * _TOKENS, _FIRST + (number + 1) * _TOKENS)
            embedding[rows, 1 + number] = _SIZE
            output[rows, 1 + number] = scale * _LOGIT
            if phase == 0:
                output[rows, 0] = scale * (_LOGIT + math.log(share))
                following = slice(rows.stop, rows.stop + _TOKENS)
                output[following, 1 + number] = scale * (_LOGIT + math.log(leave / (1 - leave)))
            else:
                output[_EOS, 1 + number] = scale * (_LOGIT + math.log(_TOKENS * leave / (1 - leave)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
