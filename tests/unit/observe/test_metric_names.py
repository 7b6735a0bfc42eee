"""Every metric has a line with unit and meaning, and docs/metrics.md is made of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from hybridflow.observe.metric_names import LINES, SECTIONS, line_of, table
from tests.arch.files import ROOT, nodes, python_files

ROOMS = ("trainer", "rollout", "mcore", "fsdp", "workers", "algorithms", "flows", "engines")
# parts of names, completed elsewhere, and a sum that becomes another metric
PARTS = {
    "critic/pass@",
    "critic/score_of/",
    "engine/*",
    "perf/offloaded_gb/",
    "reward/*",
    "rollout/mismatch/",
    "rollout/mismatch/*",
    "rollout_correction/weight_squared",
    "actor/mtp/",
    "actor/mtp/depth_",
    "actor/router_replay/",
    "actor/router_replay/*",
}


def texts() -> Iterator[str]:
    """Strings of the rooms that log metrics; a part that is computed is *."""
    for room in ROOMS:
        for path in python_files(f"hybridflow/{room}"):
            for node in nodes(path.read_text(encoding="utf-8")):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(one.value) if isinstance(one, ast.Constant) else "*"
                        for one in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == table()
    assert {line.section for line in LINES} == set(SECTIONS)
    assert all(line.unit and line.meaning for line in LINES)


def test_every_name_in_the_code_has_a_line() -> None:
    heads = {line.name.partition("/")[0] for line in LINES} - {"VAL", "CORE"}
    seen, without = 0, set()
    for text in texts():
        if not re.fullmatch(r"[a-z_]+/[\w/@*-]+", text) or text.partition("/")[0] not in heads:
            continue
        seen += 1
        # `spread` completes some names
        for name in (text, text.replace("*", "7")):
            if line_of(name) or line_of(f"{name}/mean"):
                break
        else:
            without.add(text)
    assert seen > 80
    assert without <= PARTS, f"write a line in metric_names.py: {sorted(without - PARTS)}"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("critic/score/mean", "critic/score/SPREAD"),
        ("tester/critic/score/mean", "critic/score/SPREAD"),
        ("critic/score_of/openai/gsm8k/mean", "critic/score_of/SOURCE/mean"),
        ("val/openai/gsm8k/score", "VAL/SOURCE/score"),
        ("val-hard/openai/gsm8k/pass@16", "VAL/SOURCE/pass@K"),
        ("val-core-hard/openai/gsm8k/acc/best@16/mean", "CORE/SOURCE/VARIABLE/best@K/mean"),
        ("timing_s/update_actor", "timing_s/PHASE"),
        ("rollout/mismatch/2_syncs_behind", "rollout/mismatch/K_syncs_behind"),
        ("reward_extra/format ok/max", "reward_extra/NAME/SPREAD"),
        ("critic/score/median", None),
        ("actor/unheard_of", None),
        ("a/b/critic/score/mean", None),
    ],
)
def test_a_name_finds_its_line(name: str, line: str | None) -> None:
    found = line_of(name)
    assert (found.name if found else None) == line
