"""Entries of a user's files are tried before anything starts: those of every key, in a process of
their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import own_entries
from hybridflow.config.keys import all_keys
from hybridflow.config.load import load_config
from hybridflow.config.schema import RunConfig

ENTRIES = {key: kind for key, kind in all_keys(RunConfig) if kind.entry}
LATER = sorted(set(ENTRIES) - set(own_entries._CHECKED_HERE))
FILE = """
import sys
from hybridflow.agents.tools.base import tool
print("a file may print")

@tool("shout")
def shout(text: str) -> str:
    "Say it louder."
    return text.upper()
"""


def said(value: str, *keys: str) -> list[str]:
    """The problems where each of these keys has this value, and `reward.combine` too if the
    verifiers have it."""
    given = [f"{key}=[{value}]" if ENTRIES[key].is_list else f"{key}={value}" for key in keys]
    config = load_config("e2e", given)
    if "reward.verifiers" in keys:
        config = replace(config, reward=replace(config.reward, combine={value: 1.0}))
    return list(own_entries.problems(config))


def test_a_missing_file_is_said_for_every_key_that_names_a_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.run", never)
    assert len(ENTRIES) >= 10
    found = said("nowhere/x.py:y", *ENTRIES)
    assert sorted(line.partition("=")[0] for line in found) == sorted([*ENTRIES, "reward.combine"])
    assert all("file 'nowhere/x.py' not found" in line for line in found)
    assert said("") == []


@pytest.mark.slow
def test_each_kind_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE)
    found = said(f"{tmp_path}/own.py:shout", *LATER)
    assert sorted(line.partition("=")[0] for line in found) == sorted(
        {*LATER, "reward.combine"} - {"rollout.agent.tools"}
    )
    assert all("does not register" in line and "it registers: none" in line for line in found), (
        found
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 / 0", r"could not be imported: ZeroDivisionError: division by zero (line 1)"),
        ("import os; os._exit(3)", "the process that imports them failed: status 3"),
        ("import time; time.sleep(600)", "importing took more than 1 s"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    if "sleep" in text:
        monkeypatch.setattr(own_entries, "_IMPORT_S", 1.0)
    [line] = said(f"{tmp_path}/own.py:mine", "data.prepare.task")
    assert (
        line.startswith(("data.prepare.task=", str(tmp_path)))
        and expected in line
        and "own.py" in line
    )


def test_a_library_that_a_submitting_machine_lacks_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("import a_library_of_the_nodes")
    asked = [("data.prepare.task", "hybridflow.data.prepare.tasks", f"{tmp_path}/own.py:mine")]
    assert "No module named" in own_entries.main(asked)[0]
    monkeypatch.setattr(
        own_entries, "_lacks_what_nodes_have", lambda cause: isinstance(cause, ModuleNotFoundError)
    )
    assert own_entries.main(asked) == []


@pytest.mark.slow
@pytest.mark.parametrize("takes", ["", ", with_support=False"])
def test_an_engine_that_cannot_tell_supports_is_refused_where_they_are_needed(
    tmp_path: Path, takes: str
) -> None:
    (tmp_path / "own.py").write_text(
        "from hybridflow.engines.base import ENGINES\n"
        "class Mine:\n"
        "    def generate(self, prompts, sampling, most, stop_ids=(), *, "
        f"with_routes=False{takes}): ...\n"
        "ENGINES.register('mine', Mine)\n"
    )
    engine = f"rollout.engine={tmp_path}/own.py:mine"
    assert list(own_entries.problems(load_config("e2e", [engine]))) == []
    found = list(own_entries.problems(load_config("e2e", [engine, "rollout.sampling.top_k=20"])))
    assert [engine in line and "has no argument with_support" in line for line in found] == (
        [] if takes else [True]
    )
