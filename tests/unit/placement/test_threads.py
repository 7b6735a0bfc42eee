"""Threads of the processes of a role: together they have all cores, and no more."""

from __future__ import annotations

import pytest

from hybridflow.config.load import load_config
from hybridflow.placement.threads import describe, threads_by_role, user_limit

ONE = ["actor=tiny", "cluster=one-process", "rollout=tiny"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "actor", "rollout"),
    [
        ([], {1: 1, 2: 1, 4: 1, 8: 2, 12: 3}, {1: 1, 2: 1, 4: 2, 8: 4, 12: 6}),
        (ONE, {1: 1, 2: 2, 8: 8}, {1: 1, 2: 2, 8: 8}),
        ([*ONE, "rollout.tensor=2"], {2: 2, 8: 8}, {2: 1, 8: 4}),
    ],
)
def test_the_processes_of_a_role_share_the_cores(
    words: list[str], actor: dict[int, int], rollout: dict[int, int]
) -> None:
    config = load_config("tiny-moe-grpo", words)
    for cores, threads in actor.items():
        found = threads_by_role(config, cores)
        assert (found["actor"], found["rollout"]) == (threads, rollout[cores]), cores


@pytest.mark.slow
def test_roles_in_processes_of_their_own_share_among_themselves() -> None:
    config = load_config("tiny-moe-ppo", ["critic=tiny-own"])
    found = threads_by_role(config, 8)
    assert found["critic"] == 8 // config.critic.procs
    assert found["reference"] == found["actor"]  # in the actor's processes


def test_the_environment_of_the_user_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny-moe-grpo", ONE)
    for text, limit, threads in (
        ("", None, 8),
        ("3", 3, 3),
        ("4,2", 4, 4),
        ("64", 64, 8),
        ("many", None, 8),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert user_limit() == limit
        assert threads_by_role(config, 8, user_limit())["actor"] == threads


def test_explain_names_the_roles_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    config = load_config("tiny-moe-grpo", ONE)
    assert describe(config, 2, "train").startswith(
        "Threads per process: actor 2, rollout 2; the processes of a role share 2 cores"
    )
    assert "rollout" not in describe(config, 2, "sft")
