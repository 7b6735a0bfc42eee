"""Additional policies in a flow: what the check before the start refuses, with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.schema import LoraConfig, PolicyConfig, RunConfig
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.flows.base import flow
from hybridflow.saving.store import Checkpoint
from hybridflow.trainer.flow_check import check_flow
from hybridflow.trainer.loop import check_trained_roles
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
        ("run.tester.advantages(tests)", "tests", r"run.tester.advantages\(batch\)` first"),
        ('.with_columns(scores=tests.lengths("response_ids"))', "", "the batch has no scores"),
        ('["a", "b"]', '"a"', "a list with at least one prompt"),
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


def freezing(folder: Path, body: str) -> list[str]:
    """What the check says of the flow with a frozen tester."""
    folder.mkdir()
    config = following(config_of(folder / "run"), own(folder, body, ROLES))
    roles = {"tester": PolicyConfig(config.model, config.actor, config.rollout, frozen=True)}
    said = list[str]()
    check_flow(replace(config, roles=roles), said.append)
    return said


def test_a_frozen_policy_takes_weights_and_is_never_updated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roles.tester.frozen=true, so it has no optimizer"):
        freezing(tmp_path / "updated", BODY)
    takes = BODY.replace("tester.update(tests)", "tester.take(run.policy)")
    assert freezing(tmp_path / "taking", takes) == []


def test_policies_on_one_base_take_adapters_that_fit(tmp_path: Path) -> None:
    takes = BODY.replace("tester.update(tests)", "tester.take(run.policy)")
    config = following(config_of(tmp_path / "run"), own(tmp_path, takes, ROLES))

    def says(ours: LoraConfig, theirs: LoraConfig) -> None:
        first, second = (replace(config.actor, lora=lora) for lora in (theirs, ours))
        tester = PolicyConfig(config.model, second, config.rollout, "policy", frozen=True)
        check_flow(replace(config, actor=first, roles={"tester": tester}), lambda line: None)

    says(LoraConfig(rank=4), LoraConfig(rank=4))
    with pytest.raises(
        ConfigError, match=r"roles.tester.actor.lora.rank=2 differs from the other policy's 4"
    ):
        says(LoraConfig(rank=2), LoraConfig(rank=4))


def test_a_trained_policy_with_adapters_on_weights_of_its_own_takes_none(tmp_path: Path) -> None:
    takes = BODY.replace("tester.update(tests)", "tester.take(run.policy)")
    config = following(config_of(tmp_path / "run"), own(tmp_path, takes, ROLES))
    adapted = replace(config.actor, lora=LoraConfig(rank=4))
    tester = PolicyConfig(config.model, adapted, config.rollout)
    with pytest.raises(ConfigError, match=r"set roles.tester.base=policy to copy adapters"):
        check_flow(replace(config, roles={"tester": tester}), lambda line: None)


def test_a_policy_that_the_flow_does_not_call_is_refused(tmp_path: Path) -> None:
    body = "\n".join(line for line in BODY.splitlines() if "test" not in line)
    with pytest.raises(ConfigError, match=r"never calls run.tester.*roles.tester"):
        checked(tmp_path, body)


def test_a_misspelt_role_is_no_policy_of_its_own() -> None:
    with pytest.raises(ConfigError, match="did you mean 'critic'"):
        flow("x", roles=("policy", "critik"))(_body)
    flow("other_names", roles=("policy", "tester"))(_body)


def test_a_checkpoint_without_a_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    config = config_of(tmp_path / "run")
    checkpoint = Checkpoint(tmp_path, "rl", 1, {})
    check_trained_roles(config, checkpoint)
    roles = {"tester": PolicyConfig(config.model, config.actor, config.rollout)}
    check_trained_roles(replace(config, roles=roles), None)
    with pytest.raises(CheckpointError, match=r"did not train the tester.*another name"):
        check_trained_roles(replace(config, roles=roles), checkpoint)
    with pytest.raises(CheckpointError, match="did not train the critic"):
        check_trained_roles(following_gae(config), checkpoint)
    (tmp_path / "tester").mkdir()
    check_trained_roles(replace(config, roles=roles), checkpoint)


def following_gae(config: RunConfig) -> RunConfig:
    return replace(config, algorithm=replace(config.algorithm, adv_estimator="gae"))


async def _body(run: object) -> None:
    """Nothing."""
