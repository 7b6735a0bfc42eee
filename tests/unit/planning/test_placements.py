"""Which placement is the fastest, beside what the HybridFlow paper states."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.planning.placements import SETTINGS, STATED, Setting, agrees, fastest, mapped, table

ROOT = Path(__file__).resolve().parents[3]
# where the planner does not find what the paper states: with its own network and layouts, and with
# the paper's
DIFFERS = {
    ("13B", "13B", 96),
    ("13B", "13B", 128),
    ("34B", "34B", 96),
    ("34B", "34B", 128),
    ("13B", "70B", 128),
}
DIFFERS_PAPERS = {("13B", "13B", 128)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [one for one in SETTINGS if one.actor == "34B"], ids=lambda one: str(one.devices)
)
def test_34b_models_are_colocated_on_few_devices_and_split_on_many(setting: Setting) -> None:
    assert fastest(mapped(setting, is_papers=True)) == setting.paper


@pytest.mark.full
def test_the_fastest_placement_is_the_papers_wherever_the_document_says_so() -> None:
    lead: dict[tuple[str, str], float] = {}
    for setting in SETTINGS:
        found = mapped(setting)
        best = found["any"]
        models = (setting.actor, setting.critic)
        assert best is not None and best.seconds == min(
            one.seconds for one in found.values() if one is not None
        )
        if setting.paper is not None:
            key = (*models, setting.devices)
            assert agrees(setting) == (key not in DIFFERS), setting
            assert agrees(setting, is_papers=True) == (key not in DIFFERS_PAPERS), setting
        # the paper's reason: a batch that does not grow keeps colocated models less and less busy
        together = found["colocate"]
        apart = found["split"]
        if together and apart and setting.actor != "70B":
            now = apart.seconds / together.seconds
            assert now <= lead.get(models, now), setting
            lead[models] = now


@pytest.mark.full
def test_the_document_has_the_tables_of_placements() -> None:
    document = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert table() in document
    assert table(STATED, is_papers=True) in document
