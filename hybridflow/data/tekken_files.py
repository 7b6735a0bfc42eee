"""The tokenizer of Mistral's models, read from a `tekken.json` where the folder has no
tokenizer.json.

transformers converts it, with the package mistral-common only if the file lists no special tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.errors import DataError

TEKKEN = "tekken.json"
_MOST_BYTES = 128 << 20  # the published files are 15 to 20 MB


def is_tekken_folder(folder: Path) -> bool:
    """Return True if the folder's only tokenizer is a `tekken.json`."""
    others = ("tokenizer.json", "tokenizer.model")
    return (folder / TEKKEN).is_file() and not any((folder / name).exists() for name in others)


def read_tekken(folder: Path) -> Any:
    """Read the tokenizer of the folder, with the chat template in chat_template.jinja.

    AutoTokenizer reads this file too, but without the end-of-sequence token and the template.

    Raises:
        DataError: the file is invalid, or needs a package that is not installed.
    """
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    file = folder / TEKKEN
    if file.stat().st_size > _MOST_BYTES:
        raise DataError(f"{file} is larger than the limit of {_MOST_BYTES} bytes")
    try:
        return convert_tekken_tokenizer(str(file))
    except ImportError as error:
        raise DataError(
            f"{file} lists no special tokens, so mistral-common is needed to read it; copy the "
            f"model's tokenizer.json to {folder} (or set model.tokenizer to a folder that has "
            "one), or run `pip install mistral-common`"
        ) from error
    except Exception as error:  # KeyError, ValueError, TypeError, RecursionError, or Rust's
        raise DataError(
            f"{file} is not a valid Mistral tokenizer ({type(error).__name__}: {error}); download "
            "it again"
        ) from error
