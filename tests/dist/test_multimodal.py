"""Text models of folders with a vision tower: log-probs of packed rows against transformers'
multimodal class with text (its positions are on three axes), and exports by several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.harness.ranks import run_ranks
from tests.models import MULTIMODAL
from tests.published.multimodal import multimodal_folder, read_by_transformers, tensors_in

pytestmark = pytest.mark.slow
BOUND = 1e-5


def check(cases: list[tuple[str, str]], folder: Path) -> None:
    for kind in {kind for kind, _ in cases}:
        multimodal_folder(kind, folder / kind)
    given = [[layout, str(folder / kind)] for kind, layout in cases]
    found = run_ranks(2, "tests.dist.cases.multimodal:run_cases", cases=given, timeout_s=400)[0]
    assert len(found) == len(cases)
    for one, (kind, layout) in zip(found, cases, strict=True):
        assert one["log_probs"] < BOUND, (kind, layout, one)
        came, went = tensors_in(folder / kind), tensors_in(folder / f"{kind}-{layout}")
        assert went.keys() == came.keys()
        assert all(torch.equal(went[name], came[name]) for name in came)
        read_by_transformers(folder / f"{kind}-{layout}")


def test_ranks_read_and_write_a_folder_as_it_is(tmp_path: Path) -> None:
    check([("qwen3_5_moe", "EP2"), ("gemma3", "TP2")], tmp_path)


@pytest.mark.full
def test_every_kind_of_folder_in_several_layouts(tmp_path: Path) -> None:
    cases = [
        *((kind, layout) for kind in MULTIMODAL for layout in ("one process", "TP2", "PP2")),
        ("qwen3_5_moe", "EP2"),
    ]
    check([case for case in cases if case != ("gemma3", "PP2")], tmp_path)
