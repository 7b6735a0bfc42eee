"""The report's charts about multi-token-prediction heads: draft acceptance by the engines, and the
heads' training loss and accuracy."""

from __future__ import annotations

import re

from hybridflow.observe.charts import Chart, Series
from hybridflow.observe.run_folder import RunFolder

_MOST_DEPTHS = 7  # colours of the palette besides that of the total


def head_charts(run: RunFolder) -> list[Chart]:
    """Return the charts about drafting by the engines and training of the heads. Charts without
    data are dropped when drawn."""
    per_pass = "engine/tokens_per_pass"
    return [
        _by_depth(
            run,
            "Drafted tokens that the model accepted",
            ("engine/accepted_drafts", "engine/accepted_drafts/depth_{}"),
            "share of all drafted tokens; by depth: share of passes",
        ),
        Chart(
            "Tokens from each pass of the model",
            [Series(per_pass, run.points("train", per_pass))],
            "accepted draft tokens plus one",
            per_pass,
            include=(1.0,),
        ),
        _by_depth(
            run,
            "Correct predictions of the heads",
            ("actor/mtp/accuracy", "actor/mtp/depth_{}/accuracy"),
            "targets",
        ),
        Chart(
            "Loss of the heads",
            [Series("actor/mtp/loss", run.points("train", "actor/mtp/loss"))],
            "nats per token",
            "actor/mtp/loss",
            include=(0.0,),
        ),
    ]


def _by_depth(run: RunFolder, title: str, names: tuple[str, str], unit: str) -> Chart:
    """Return a chart of a share over all depths and at each depth. `names` contains the names of
    the two metrics."""
    total, of_depth = names
    pattern = re.compile(re.escape(of_depth).replace(r"\{\}", "([0-9]+)"))
    found = map(pattern.fullmatch, run.names("train"))
    depths = sorted(int(one[1]) for one in found if one is not None)[:_MOST_DEPTHS]
    series = [Series("all", run.points("train", total), 0)]
    for color, depth in enumerate(depths, 1):
        points = run.points("train", of_depth.format(depth))
        series.append(Series(f"depth {depth}", points, color))
    about = f"{total}, {of_depth.format('K')}" if depths else total
    return Chart(title, series, unit, about, percent=True, include=(0.0, 1.0))
