"""Further policies in a flow: what the check before the start refuses, with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.schema import PolicyConfig
from hybridflow.errors import ConfigError
from hybridflow.flows.base import flow
from hybridflow.trainer.flow_check import check_flow
from tests.unit.flows.bodies import following, own
from tests.unit.trainer.worlds import config_of

ROLES = ("policy", "tester")
BODY = """
async for step in run.steps():
    batch = await run.samples()
    tests = await run.tester.generate(["a", "b"])
    batch = run.advantages(await run.policy.log_probs(batch))
    tests = await run.tester.log_probs(tests.with_columns(scores=tests.lengths("response_ids")))
    tests = run.tester.advantages(tests)
    await run.policy.update(batch)
    await run.tester.update(tests)
    await run.sync()
"""


def checked(folder: Path, body: str) -> list[str]:
    config = following(config_of(folder / "run"), own(folder, body, ROLES))
    roles = {"tester": PolicyConfig(config.model, config.actor, config.rollout)}
    said = list[str]()
    check_flow(replace(config, roles=roles), said.append)
    return said


def test_a_flow_with_two_policies_passes(tmp_path: Path) -> None:
    assert checked(tmp_path, BODY) == []


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("    await run.sync()\n", "", r"call `await run.sync\(\)`"),
        (
            "await run.tester.update",
            "run.tester.update",
            r"tester.update\(batch\) is never awaited",
        ),
        ("run.tester.advantages(tests)", "tests", r"run.tester.advantages\(batch\)` before it"),
        ('.with_columns(scores=tests.lengths("response_ids"))', "", "the batch has no scores"),
        ('["a", "b"]', '"a"', "a list of prompts"),
        (
            "    await run.sync()",
            "    await run.tester.generate(['a'])\n    await run.sync()",
            "after `await run.sync",
        ),
        (
            "    await run.sync()",
            "    await run.tester.update(tests)\n    await run.sync()",
            "called twice",
        ),
        (
            "    await run.sync()",
            "    await run.sync()\n    await run.tester.take(1)",
            "another policy",
        ),
    ],
)
def test_a_mistake_is_refused_before_the_start(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    assert before in BODY
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path, BODY.replace(before, after))


def test_a_policy_that_the_flow_does_not_call_is_refused(tmp_path: Path) -> None:
    body = "\n".join(line for line in BODY.splitlines() if "test" not in line)
    with pytest.raises(ConfigError, match=r"never calls run.tester.*roles.tester"):
        checked(tmp_path, body)


def test_a_misspelt_role_is_no_policy_of_its_own() -> None:
    with pytest.raises(ConfigError, match="did you mean 'critic'"):
        flow("x", roles=("policy", "critik"))(_body)
    flow("other_names", roles=("policy", "tester"))(_body)


async def _body(run: object) -> None:
    """Nothing."""
