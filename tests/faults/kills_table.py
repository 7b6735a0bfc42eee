"""docs/kills.md: which processes of conversations were killed when, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.faults.table import found, section

if TYPE_CHECKING:
    from tests.faults.kills import Outcome

WENT_ON = "The driver went on"
HEAD = """\
# Killed processes of conversations

This page is written by `python -m tests.faults.kills --table` from the outcomes of `python -m tests.faults.kills`
(`make kills`). A campaign is one small asynchronous run: a real driver with the service, conversations, groups and
checkpoints of `hybridflow/rollout`, two engines without a model whose tokens follow from those before them, two
processes of an environment, an MCP server and the sandbox. Processes are killed with SIGKILL in several of its steps,
at moments that a seed draws; when the driver ends, the same command is given again. A trial is one kill. A campaign
passes when every prompt was trained once, in a group of the right size; every token, log-probability and version is the
one that an engine gave, and no version is older than `trainer.max_staleness` allows; every observation and reward is
the right one; conversations that have lost their environment or their MCP server are masked, with a reason, and none is
where neither was killed; no process is left. A fault stays in the list below when it has been fixed since. The moment
is what the driver had begun last. Seconds run until the answers of a step have come, on a machine that several jobs
shared.
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The document."""
    bad = [one for one in outcomes if one.faults]
    lost = sum(one.lost for one in outcomes)
    summary = (
        f"{len(outcomes)} trials, {len(bad)} with a fault; {lost} conversations were lost and "
        "masked."
    )
    lines = [HEAD, summary, ""]
    lines += section("Process", outcomes, lambda one: one.victim, WENT_ON)
    lines += section(
        "Process and moment", outcomes, lambda one: f"{one.victim}, {one.moment}", WENT_ON
    )
    lines += section("`trainer.max_staleness`", outcomes, lambda one: str(one.staleness), WENT_ON)
    lines += found(
        [
            (
                f"seed {o.seed}, staleness {o.staleness}: {o.victim} in {o.moment} {o.step}: "
                f"{o.faults[0][:200]}"
            )
            for o in bad
        ]
    )
    return "\n".join(lines)
