"""`data.val_sets`: what a set leaves out is as for `data.val_files`, and what makes no sense is
refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config.build import build
from hybridflow.config.load import dump_yaml, load_config
from hybridflow.config.val_sets import problems, val_sets
from tests.unit.config.small import found

pytestmark = pytest.mark.usefixtures("elsewhere")


def config_of(**sets: Any) -> Any:
    data = {"val_files": ["v"], "val_max_prompts": 7, "val_sets": sets}
    return build(
        {
            "data": data,
            "rollout": {"val_samples": 2, "val_sampling": {"temperature": 0.5, "top_k": 9}},
        }
    )


def test_a_set_is_as_the_unnamed_one_but_for_what_it_gives() -> None:
    given = {
        "files": ["h"],
        "samples": 8,
        "max_prompts": None,
        "sampling": {"temperature": 1, "top_p": 0.9},
    }
    config = config_of(hard=given, easy={"files": ["e"]})
    assert list(problems(config)) == []
    unnamed, hard, easy = val_sets(config).values()
    assert (unnamed.files, unnamed.max_prompts, unnamed.samples, unnamed.sampling.temperature) == (
        ("v",),
        7,
        2,
        0.5,
    )
    assert (hard.files, hard.max_prompts, hard.samples) == (("h",), None, 8)
    assert (hard.sampling.temperature, hard.sampling.top_p, hard.sampling.top_k) == (1.0, 0.9, 9)
    assert (easy.files, easy.max_prompts, easy.samples, easy.sampling) == (
        ("e",),
        7,
        2,
        unnamed.sampling,
    )


@pytest.mark.slow
def test_a_run_folder_keeps_the_order_of_the_sets(tmp_path: Any) -> None:
    config = config_of(zebra={"files": ["z"]}, ant={"files": ["a"]})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert list(val_sets(load_config("config", (), tmp_path))) == ["", "zebra", "ant"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "data.val_sets={a: [x.parquet]}",
            ("data.val_sets.a", "['x.parquet']", "group of keys (files,"),
        ),
        (
            "data.val_sets={a: {files: x.parquet}}",
            ("data.val_sets.a.files", "write data.val_sets.a.files=[x.parquet]"),
        ),
        ("data.val_sets={a: {}}", ("data.val_sets.a.files is empty",)),
        (
            "data.val_sets={a: {files: [x.parquet], sample: 3}}",
            ("data.val_sets.a.sample", "did you mean", "samples"),
        ),
        (
            "data.val_sets={a: {files: [x.parquet], samples: 0}}",
            ("data.val_sets.a.samples=0 must be at least 1",),
        ),
        (
            "data.val_sets={a: {files: [x.parquet], sampling: {temperature: -1}}}",
            ("data.val_sets.a.sampling.temperature=-1", "at least 0"),
        ),
        (
            "data.val_sets={a: {files: [x.parquet], sampling: {temprature: 1}}}",
            (
                "data.val_sets.a.sampling.temprature",
                "did you mean data.val_sets.a.sampling.temperature",
            ),
        ),
        (
            "data.val_sets={a: {files: [x.parquet], samples: 4}}",
            (
                "data.val_sets.a.samples=4",
                "data.val_sets.a.sampling.temperature=0",
                "would be identical",
            ),
        ),
        ("data.val_sets={a/b: {files: [x.parquet]}}", ("'a/b'", "metric and folder names")),
        ("data.val_sets={7: {files: [x.parquet]}}", ("7 is used in metric", "quote")),
        (
            "data.val_sets={a: {files: [nowhere.parquet]}}",
            ("data.val_sets.a.files: nowhere.parquet", "not exist"),
        ),
    ],
)
def test_a_set_without_sense_is_refused(override: str, parts: tuple[str, ...]) -> None:
    lines = found(override)
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines
