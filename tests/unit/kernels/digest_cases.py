"""Run by test_kernels.py in Triton's interpreter: the checksum, bit for bit against Python's
integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow_kernels.digest import BLOCK, digest

WORD = (1 << 64) - 1


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    return word ^ (word >> 27)


def exact(body: bytes, seed: int) -> int:
    whole = len(body) // 8 * 8
    words = [body[i : i + 8] for i in range(0, whole, 8)] + [body[whole:].ljust(8, b"\0")]
    keys = (
        mixed(((position + 1) * 0x9E3779B97F4A7C15 + seed) & WORD) for position in range(len(words))
    )
    return (
        sum(
            mixed(int.from_bytes(word, "little") ^ key)
            for word, key in zip(words, keys, strict=True)
        )
        & WORD
    )


@settings(max_examples=10)
@given(
    size=st.sampled_from([0, 1, 7, 8, 9, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 8, 24 * BLOCK + 3]),
    seed=st.integers(0, WORD),
    begin=st.sampled_from([0, 3, 8]),
)
def test_it_equals_pythons_integers(size: int, seed: int, begin: int) -> None:
    generator = torch.Generator().manual_seed(size)
    body = torch.randint(0, 256, (begin + size,), dtype=torch.uint8, generator=generator)[begin:]
    assert int(digest(body, seed)) & WORD == exact(bytes(body.tolist()), seed)


@pytest.mark.parametrize(
    "body",
    [torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]],
)
def test_what_would_be_read_wrongly_is_refused(body: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected contiguous bytes"):
        digest(body, 0)
