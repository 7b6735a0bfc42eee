"""Additional policies in a configuration: what the first one provides, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.config import derived
from hybridflow.config.check import problems
from hybridflow.config.explain import Origins, explain
from hybridflow.config.load import dump_yaml, load_config
from hybridflow.config.schema import ModelConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.placement import pools_of
from hybridflow.placement.pools import is_engine
from hybridflow.planning.deadlines import StartAllowance

FLOW = """
from hybridflow import flow


@flow("two", roles=("policy", "reference", "tester"))
async def two(run):
    pass
"""
LORA = "actor.lora.rank=4"
ONE = "actor: {parallel: {tensor: 1, pipeline: 1, expert: 1, sequence: false}}"


def given(folder: Path, roles: str, *words: str) -> RunConfig:
    (folder / "two.py").write_text(FLOW)
    flow = f"algorithm.flow={folder}/two.py:two"
    return load_config("e2e", [flow, f"+roles={roles}", *words])


@pytest.mark.slow
def test_a_policy_has_the_settings_of_the_first_one_where_it_gives_no_others(
    tmp_path: Path,
) -> None:
    roles = f"{{tester: {{procs: 2, {ONE}, rollout: {{n: 2}}}}}}"
    config = given(tmp_path, roles, "actor.optim.lr=0.5", "rollout.sampling.temperature=0.7")
    view = derived.policy_view(config, "tester")
    assert view.actor.optim.lr == 0.5 and view.rollout.sampling.temperature == 0.7
    assert (view.rollout.n, config.rollout.n) == (2, 4)
    assert derived.world_size(view) == 2 and derived.data_parallel_size(view) == 2
    assert derived.samples_per_step(view) == config.data.train_batch_size * 2
    assert not problems(config)
    file = tmp_path / "again.yaml"
    file.write_text(dump_yaml(config))
    assert load_config("again", [], tmp_path) == config


def test_a_policy_with_its_own_model_has_nothing_of_the_first_ones(tmp_path: Path) -> None:
    config = given(tmp_path, "{tester: {model: {path: some/model}}}", "model.dtype=bfloat16")
    model = config.roles["tester"].model
    assert model == ModelConfig(path="some/model", dtype="bfloat16")
    assert any(
        "roles.tester" in line and "hf download some/model" in line for line in problems(config)
    )


def test_a_policy_has_devices_of_its_own(tmp_path: Path) -> None:
    config = given(tmp_path, f"{{tester: {{procs: 2, {ONE}, rollout: {{num_engines: 3}}}}}}")
    pools = {pool.name: pool for pool in pools_of(config)}
    assert list(pools) == ["actor", "rollout", "tester", "tester.rollout"]
    assert [group.count for group in pools["tester"].groups] == [2]
    assert [(group.count, group.is_engine) for group in pools["tester.rollout"].groups] == [
        (3, True)
    ]
    assert is_engine("tester.rollout") and not is_engine("prerollout")
    shared = given(tmp_path, f"{{tester: {{procs: 2, {ONE}, rollout: {{pool: actor}}}}}}")
    groups = {pool.name: [one.role for one in pool.groups] for pool in pools_of(shared)}
    assert groups["tester"] == ["tester", "tester.rollout"]
    allowance = StartAllowance.of(config, {"vocab_size": 32, **config.model.hf_config})
    assert allowance.applied(config).roles == config.roles


def test_a_policy_on_the_first_ones_base_has_its_ranks(tmp_path: Path) -> None:
    config = given(tmp_path, "{tester: {base: policy, actor: {lora: {rank: 2}}}}", LORA)
    assert not problems(config)
    assert (config.roles["tester"].actor.lora.rank, config.actor.lora.rank) == (2, 4)
    view = derived.policy_view(config, "tester")
    assert view.cluster == config.cluster
    pools = {pool.name: [one.role for one in pool.groups] for pool in pools_of(config)}
    assert pools == {
        "actor": ["actor"],
        "rollout": ["rollout"],
        "tester.rollout": ["tester.rollout"],
    }
    assert derived.devices_of(config, "tester") == "actor"
    said = explain(config, Origins(frozenset(), {}))
    assert "roles.tester: an additional policy, adapters in the policy's 4 processes" in said
    apart = given(tmp_path, f"{{tester: {{procs: 2, {ONE}}}}}")
    assert derived.devices_of(apart, "tester") == "tester"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tester", "words", "message"),
    [
        ("", (), "requires adapters: .* set actor.lora.rank"),
        ("actor: {lora: {rank: 0}}", (LORA,), "set roles.tester.actor.lora.rank"),
        (
            "actor: {parallel: {tensor: 1}}",
            (LORA,),
            "roles.tester.actor.parallel.tensor=1 differs from actor.parallel.tensor=2",
        ),
        (
            "model: {dtype: bfloat16}",
            (LORA,),
            "roles.tester.model.dtype=bfloat16 differs from model.dtype=float32",
        ),
        (
            "actor: {backend: fsdp}",
            (LORA,),
            "roles.tester.actor.backend=fsdp differs from actor.backend=megatron",
        ),
        ("", (LORA, "actor.backend=fsdp"), "not supported with actor.backend=fsdp"),
        ("procs: 4", (LORA,), "roles.tester.procs=4 has no effect"),
        ("", (LORA, "actor.offload.weights=true"), "with actor.offload.weights=true, because"),
        (
            "actor: {offload: {weights: true}}",
            (LORA,),
            "with roles.tester.actor.offload.weights=true",
        ),
        ("rollout: {pool: actor}", (LORA,), "roles.tester.rollout.pool=actor must be null"),
        (
            "rollout: {pool: null, sleep_while_training: false}",
            (LORA, "rollout.pool=actor", "rollout.sleep_while_training=true"),
            "set rollout.pool=null",
        ),
    ],
)
def test_adapters_that_cannot_share_a_base_are_refused(
    tmp_path: Path, tester: str, words: tuple[str, ...], message: str
) -> None:
    roles = f"{{tester: {{base: policy{', ' if tester else ''}{tester}}}}}"
    found = problems(given(tmp_path, roles, *words))
    lines = [line for line in found if line.startswith("roles.tester.base=policy")]
    assert any(re.search(message, line) for line in lines), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "words", "message"),
    [
        ("{critic: {}}", (), "roles.critic: a flow calls a policy as run.critic"),
        ("{a-b: {}}", (), "roles.a-b: .* choose another one"),
        ("{other: {}}", (), r"calls run.tester, but this run has no such policy: .*{tester: {}}"),
        ("{tester: {}, other: {}}", (), "does not call run.other"),
        ("{tester: {procs: 3}}", (), r"roles.tester .*: actor.parallel .* does not divide"),
        (
            f"{{tester: {{{ONE}, train_batch_size: 3}}}}",
            (),
            "roles.tester .*: data.train_batch_size=3 is not a multiple",
        ),
        (
            f"{{tester: {{{ONE}}}}}",
            ("algorithm.adv_estimator=gae",),
            "only the first policy can have a critic",
        ),
        (
            f"{{tester: {{{ONE}, rollout: {{pool: critic}}}}}}",
            (),
            r"must be null \(separate devices\) or actor",
        ),
        ("{tester: {actor: {policy_loss: nope}}}", (), "roles.tester.actor.policy_loss"),
        (
            "{tester: {actor: {lora: {rank: 4, sync: adapter}}}}",
            (),
            "roles.tester.actor.lora.sync=adapter is not supported",
        ),
        (
            "{tester: {}}",
            (LORA, "actor.lora.sync=adapter"),
            r"^actor.lora.sync=adapter is not supported with roles \(tester\)",
        ),
    ],
)
def test_what_is_wrong_is_named_with_the_policy(
    tmp_path: Path, roles: str, words: tuple[str, ...], message: str
) -> None:
    try:
        found = problems(given(tmp_path, roles, *words))
    except ConfigError as error:
        found = [str(error)]
    assert any(re.search(message, line) for line in found), found


def test_a_key_that_does_not_exist_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roles.tester.proc; did you mean roles.tester.procs"):
        given(tmp_path, "{tester: {proc: 2}}")
    with pytest.raises(ConfigError, match=r"roles.tester: got 3, expected a group of keys"):
        given(tmp_path, "{tester: 3}")
