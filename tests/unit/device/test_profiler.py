"""A rank's profile of a step, and settings of profiles that cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from hybridflow.config.check import check
from hybridflow.config.load import load_config
from hybridflow.config.schema import ProfileConfig
from hybridflow.device.profiler import RankProfiler
from hybridflow.errors import ConfigError
from hybridflow.trainer.check_devices import check_devices


def names_in(file: Path) -> set[str]:
    with gzip.open(file) as text:
        return {event.get("name", "") for event in json.load(text)["traceEvents"]}


def test_only_what_runs_between_start_and_stop_is_in_the_trace(tmp_path: Path) -> None:
    profiler = RankProfiler(ProfileConfig(steps=(1,)))
    for step in (1, 2):
        torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.start()
        torch.ones(4, 4).cumsum(0)
        assert profiler.stop(tmp_path / f"step_{step}" / "rank.json.gz") == ""
        names = names_in(tmp_path / f"step_{step}" / "rank.json.gz")
        assert "aten::cumsum" in names and "aten::mm" not in names
    assert profiler.stop(tmp_path / "no.json.gz") == "" and not (tmp_path / "no.json.gz").exists()


def test_a_trace_that_cannot_be_written_is_a_reason_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profiler = RankProfiler(ProfileConfig(steps=(1,)))
    profiler.start()
    assert "could not be written: " in profiler.stop(tmp_path / "file" / "rank.json.gz")


def test_ranks_and_tools_that_cannot_be_are_refused() -> None:
    words = ["trainer.profile.steps=[1]", "trainer.profile.ranks=[0,4]"]
    with pytest.raises(ConfigError, match=r"profile\.ranks contains 4, but the actor has 4 ranks"):
        check(load_config("tiny-moe-grpo", words))
    check(load_config("tiny-moe-grpo", words[1:]))  # nothing is profiled
    run = load_config("tiny-moe-grpo", [words[0], "trainer.profile.tool=nsys"])
    check_devices(run, "cuda")
    with pytest.raises(ConfigError, match=r"tool=nsys .* set tool=torch"):
        check_devices(run, "cpu")
