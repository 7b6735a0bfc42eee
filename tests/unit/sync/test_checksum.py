"""Checksums tell a changed, moved or exchanged message from the right one, on either kind of
device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.sync.transports import base as checksum
from hybridflow.sync.transports.base import (
    DIGEST_BYTES,
    Digest,
    Payload,
    first_difference,
    joined,
    message_key,
    seeds_of,
)
from hybridflow_kernels.digest import digest as device_digest


def digest_of_host(body: torch.Tensor, seed: int) -> int:
    return int(joined([checksum.digest(Payload(body), seed)], body.device).view(torch.int64))


def digest_of_device(body: torch.Tensor, seed: int) -> int:
    return int(device_digest(body, seed))


DIGESTS = pytest.mark.parametrize("digest", [digest_of_host, digest_of_device])


@DIGESTS
@settings(max_examples=60)
@given(st.integers(1, 300), st.data())
def test_one_changed_byte_changes_the_checksum(
    digest: Callable[[torch.Tensor, int], int], size: int, data: st.DataObject
) -> None:
    body = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    place = data.draw(st.integers(0, size - 1))
    change = data.draw(st.integers(1, 255))
    before = digest(body, 5)
    assert digest(body.clone(), 5) == before
    body[place] ^= change
    assert digest(body, 5) != before


@DIGESTS
def test_exchanged_words_and_zeros_at_the_end_are_seen(
    digest: Callable[[torch.Tensor, int], int],
) -> None:
    words = torch.arange(64, dtype=torch.int64)
    exchanged = words.clone()
    exchanged[[3, 60]] = exchanged[[60, 3]]
    assert digest(words.view(torch.uint8), 1) != digest(exchanged.view(torch.uint8), 1)
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert digest(zeros, 1) != digest(zeros[:56].clone(), 1)


def test_every_message_of_a_session_has_a_seed_of_its_own() -> None:
    keys = [
        message_key(sender, receiver, bucket)
        for sender in range(4)
        for receiver in range(4)
        for bucket in range(9)
    ]
    seeds = {seed for sync in range(3) for seed in seeds_of(keys, sync)}
    assert len(seeds) == 3 * 4 * 4 * 9


def test_the_first_message_that_is_another_is_named() -> None:
    bodies = [torch.full((size,), size, dtype=torch.uint8) for size in (1, 100, 64, 7)]

    keys = [message_key(0, 0, place) for place in range(4)]

    def taken(sync: int, order: tuple[int, ...]) -> list[Digest]:
        return [
            checksum.digest(Payload(bodies[number]), seed)
            for number, seed in zip(order, seeds_of(keys, sync), strict=True)
        ]

    sent = joined(taken(1, (0, 1, 2, 3)), torch.device("cpu"))
    assert sent.numel() == DIGEST_BYTES * 4
    assert first_difference(taken(1, (0, 1, 2, 3)), sent) is None
    assert first_difference(taken(1, (0, 1, 3, 2)), sent) == 2, "a message in another's place"
    assert first_difference(taken(2, (0, 1, 2, 3)), sent) == 0, "messages of the sync before"


def test_the_device_digest_does_not_depend_on_how_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = torch.randint(
        0, 256, (8 * 1000 + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    whole = digest_of_device(body, 9)
    monkeypatch.setattr("hybridflow_kernels.digest._CHUNK", 7)
    assert digest_of_device(body, 9) == whole
