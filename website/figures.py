"""The figures of docs/concepts.md: the two journeys of docs/design.md, drawn as SVG in three
lanes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANE_WIDTH = 276
GAP = 12
HEAD = 46
LINE = 17
PADDING = 12
ROW_GAP = 26

_STYLE = """\
  svg { color-scheme: light dark; }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1c2733; }
  .lane { fill: #f3f5f8; }
  .name { font-size: 15px; font-weight: 600; fill: #3b4a5a; }
  .box { stroke-width: 1.2; }
  .driver { fill: #e3edfb; stroke: #3f6fb5; }
  .engine { fill: #e2f3e8; stroke: #2f855a; }
  .trainer { fill: #fdeedd; stroke: #b7651b; }
  .both { fill: #efe8fa; stroke: #7453b3; }
  .title { font-size: 13px; font-weight: 600; }
  .file { font-size: 11.5px; }
  .number { font-size: 11.5px; font-weight: 600; fill: #4d5b6a; }
  .arrow { fill: none; stroke: #5a6877; stroke-width: 1.6; }
  .tip { fill: #5a6877; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8ecf2; }
    .lane { fill: #20242e; }
    .name { fill: #b9c4d2; }
    .driver { fill: #1f3355; stroke: #6f9be0; }
    .engine { fill: #1b3d2b; stroke: #59b887; }
    .trainer { fill: #47301a; stroke: #e0964b; }
    .both { fill: #352a50; stroke: #a487e0; }
    .number { fill: #aeb9c7; }
    .arrow { stroke: #94a1b1; }
    .tip { fill: #94a1b1; }
  }
"""


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of a journey that happen at one place."""

    title: str
    lanes: tuple[int, ...]  # one lane, or neighbouring lanes that work together
    first: int  # number of its first step in docs/design.md


@dataclass(frozen=True)
class Figure:
    """A journey: its heading in docs/design.md, the names of its lanes, and its stages in order."""

    journey: str
    lanes: tuple[str, str, str]
    kinds: tuple[str, str, str]
    stages: tuple[Stage, ...]


FIGURES = {
    "prompt-to-gradient.svg": Figure(
        "A prompt on its way to a gradient",
        ("Driver", "Engines and rewards", "Trainer ranks"),
        ("driver", "engine", "trainer"),
        (
            Stage("Choose the prompts of a step", (0,), 1),
            Stage("Run the algorithm's flow", (0,), 3),
            Stage("Keep all columns in one batch", (0,), 4),
            Stage("Hand out requests", (0,), 6),
            Stage("Call the processes", (0,), 7),
            Stage("Generate answers", (1,), 11),
            Stage("Score finished groups", (1,), 13),
            Stage("Queue calls, balance rows", (0,), 16),
            Stage("Compute log-probabilities", (2,), 18),
            Stage("Compute advantages", (0,), 25),
            Stage("Update the policy", (2,), 27),
        ),
    ),
    "weight-to-engine.svg": Figure(
        "A weight on its way to an engine",
        ("Driver", "Trainer ranks", "Engine ranks"),
        ("driver", "trainer", "engine"),
        (
            Stage("Order the sync", (0,), 1),
            Stage("Send from each rank", (1,), 3),
            Stage("Run the transaction", (2,), 5),
            Stage("Receive in each rank", (2,), 9),
            Stage("Meet and agree", (1, 2), 10),
            Stage("Group slices into messages", (1, 2), 12),
            Stage("Stream over a transport", (1, 2), 16),
        ),
    ),
}


def files_of(journey: str) -> list[str]:
    """Return the files of a journey of docs/design.md, in order."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = design.split(f"## {journey}\n")[1].split("\n## ")[0]
    lines = re.sub(r"\n {3}", " ", section).splitlines()
    return [line.split("`")[1] for line in lines if re.match(r"\d+\. ", line)]


def draw(figure: Figure) -> str:
    """Return the SVG of a figure."""
    files = files_of(figure.journey)
    starts = [stage.first for stage in figure.stages]
    ends = [*(start - 1 for start in starts[1:]), len(files)]
    boxes = []
    y = HEAD + 8
    for stage, end in zip(figure.stages, ends, strict=True):
        steps = list(enumerate(files, 1))[stage.first - 1 : end]
        height = 2 * PADDING + LINE * (1 + len(steps)) - 4
        boxes.append((stage, steps, y, height))
        y += height + ROW_GAP
    width = 3 * LANE_WIDTH + 2 * GAP
    height = y - ROW_GAP + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(figure.journey)}</title>',
        f"<style>\n{_STYLE}</style>",
    ]
    for lane, name in enumerate(figure.lanes):
        x = _left(lane)
        lines.append(
            f'<rect class="lane" x="{x}" y="0" width="{LANE_WIDTH}" height="{height}" rx="8"/>'
        )
        middle = x + LANE_WIDTH / 2
        lines.append(
            f'<text class="name" x="{middle:g}" y="28" text-anchor="middle">{escape(name)}</text>'
        )
    for (stage, _, top, tall), (after, _, below, _) in itertools.pairwise(boxes):
        lines += _arrow(_middle(stage), top + tall, _middle(after), below)
    for stage, steps, top, tall in boxes:
        lines += _box(figure, stage, steps, top, tall)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _left(lane: int) -> int:
    return lane * (LANE_WIDTH + GAP)


def _middle(stage: Stage) -> float:
    return (_left(stage.lanes[0]) + _left(stage.lanes[-1]) + LANE_WIDTH) / 2


def _box(
    figure: Figure, stage: Stage, steps: Sequence[tuple[int, str]], top: int, tall: int
) -> list[str]:
    x = _left(stage.lanes[0]) + 8
    width = _left(stage.lanes[-1]) + LANE_WIDTH - 8 - x
    kind = figure.kinds[stage.lanes[0]] if len(stage.lanes) == 1 else "both"
    lines = [f'<rect class="box {kind}" x="{x}" y="{top}" width="{width}" height="{tall}" rx="6"/>']
    y = top + PADDING + 10
    lines.append(f'<text class="title" x="{x + 12}" y="{y}">{escape(stage.title)}</text>')
    for number, file in steps:
        y += LINE
        lines.append(
            f'<text class="number" x="{x + 28}" y="{y}" text-anchor="end">{number}</text>'
            f'<text class="file" x="{x + 36}" y="{y}">{escape(file)}</text>'
        )
    return lines


def _arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    """Return an arrow from the bottom of a box to the top of the next one, in right angles."""
    half = (y + to_y) / 2
    tip = to_y - 7
    path = f"M{x:g} {y:g}V{half:g}H{to_x:g}V{tip:g}" if x != to_x else f"M{x:g} {y:g}V{tip:g}"
    head = f"M{to_x - 5:g} {tip:g}h10l-5 7z"
    return [f'<path class="arrow" d="{path}"/>', f'<path class="tip" d="{head}"/>']
