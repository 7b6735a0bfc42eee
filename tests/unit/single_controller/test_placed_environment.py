"""The variables of a process on a GPU: its devices, and pinned memory that is as large as asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.single_controller.actors import placed_environment

ROUNDING = "pinned_max_round_threshold_mb:128"
SLOT: Any = SimpleNamespace(devices=("2", "3"))
HOST: Any = SimpleNamespace(interface="eth0")


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, ROUNDING),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            f"expandable_segments:True,{ROUNDING}",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, f"max_split_size_mb:64,{ROUNDING}"),
        (
            {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"},
            "pinned_max_round_threshold_mb:1",
        ),
    ],
)
def test_pinned_blocks_are_not_rounded_up(
    monkeypatch: pytest.MonkeyPatch, user: dict[str, str], expected: str
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    env = placed_environment(SLOT, HOST, True)
    assert env["PYTORCH_ALLOC_CONF"] == expected
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "PYTORCH_ALLOC_CONF" not in placed_environment(SLOT, HOST, False)
