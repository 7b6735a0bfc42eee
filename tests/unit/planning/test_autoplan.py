"""The mapping of a configuration is a recipe that the trainer takes and that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config.load import load_config
from hybridflow.errors import ConfigError
from hybridflow.models.layout import Coordinates
from hybridflow.planning.advice import refused, with_values
from hybridflow.planning.autoplan import auto, cuts, end_stages
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.job import Assumed, job_of
from hybridflow.planning.plan import make_plan
from hybridflow.planning.sizes import decoder_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes", "overlaps"),
    [
        ("ppo-qwen3-8b-1x8", 1, False),
        ("grpo-qwen3-30b-a3b-4x8", 4, True),
        ("ppo-llama-3.1-70b-8x8", 8, False),
        # engines over two nodes would be faster, but are refused there
        ("grpo-qwen3-235b-a22b-16x8", 16, False),
    ],
)
def test_the_mapping_is_legal_fits_and_is_no_slower(name: str, nodes: int, overlaps: bool) -> None:
    config = load_config(name)
    machines = read_cluster(None, nodes, 8)
    change, best = auto(config, machines, Assumed(), None, overlaps)
    mapped = with_values(config, change)
    assert refused(mapped) == []
    found = make_plan(job_of(mapped, machines))
    before = make_plan(job_of(config, machines))
    assert found.fits
    assert overlaps or found.seconds <= 1.05 * before.seconds
    # the plan of the mapping has the time that the search compared, and what follows the updates
    rest = sum(phase.seconds for phase in found.phases if phase.stage == "rest")
    assert overlaps or found.seconds == pytest.approx(best.seconds + rest, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "count"),
    [
        ("grpo-qwen3-8b-1x8", 2, 4),  # one engine of 8 is planned 9% shorter
        ("grpo-qwen2.5-14b-1x8", 4, 2),  # four engines of 2 are planned 17% longer
    ],
)
def test_few_engines_are_taken_only_where_four_would_take_much_longer(
    name: str, tensor: int, count: int
) -> None:
    config = load_config(name)
    machines = read_cluster(None, config.cluster.nodes, 8)
    change, _ = auto(config, machines, Assumed(), None, False)
    assert (change["rollout.tensor"], change["rollout.num_engines"]) == (tensor, count)
    assert (config.rollout.tensor, config.rollout.num_engines) == (tensor, count)
    seconds = [
        make_plan(
            job_of(
                with_values(config, {"rollout.tensor": one, "rollout.num_engines": of}), machines
            )
        ).seconds
        for one, of in ((tensor, count), *([(8, count * tensor // 8)] if tensor < 8 else []))
    ]
    assert seconds[0] <= 1.15 * seconds[-1]


@pytest.mark.parametrize(("name", "nodes"), [("grpo-qwen3-8b-1x8", 3)])
def test_mini_batches_that_three_ranks_cannot_share_take_three_pipeline_stages(
    name: str, nodes: int
) -> None:
    config = load_config(name)
    machines = read_cluster(None, nodes, 8)
    change, _ = auto(config, machines, Assumed(), None, False)
    mapped = with_values(config, change)
    assert refused(mapped) == []
    found = make_plan(job_of(mapped, machines))
    assert found.fits and found.job.devices == 24 and mapped.actor.parallel.pipeline % 3 == 0
    assert found.seconds < make_plan(job_of(config, read_cluster(None, 1, 8))).seconds
    two = auto(config, read_cluster(None, 2, 8), Assumed(), None, False)[1]
    assert found.seconds < two.seconds


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [8, 16])
def test_a_reference_that_leaves_the_policys_processes_is_still_offloaded(nodes: int) -> None:
    words = ["actor.kl_loss_coef=0.01", "reference.max_tokens_per_micro_batch=12288"]
    config = load_config("ppo-llama-3.1-70b-8x8", words)
    machines = read_cluster(None, nodes, 8)
    change, _ = auto(config, machines, Assumed(), None, False)
    mapped = with_values(config, change)
    assert (
        config.actor.offload.weights
        and mapped.reference.placement == "own"
        and mapped.reference.offload.weights
    )
    assert refused(mapped) == [] and make_plan(job_of(mapped, machines)).fits


def test_devices_that_no_layout_can_use_stay_idle() -> None:
    config = load_config("grpo-qwen3-8b-1x8")  # 36 layers and mini-batches of a power of two
    change, _ = auto(config, read_cluster(None, 11, 8), Assumed(), None, False)
    mapped = with_values(config, change)
    assert (
        refused(mapped) == []
        and make_plan(job_of(mapped, read_cluster(None, 11, 8))).job.devices < 88
    )


def test_a_critic_with_devices_of_its_own_is_planned_beside_the_policy() -> None:
    config = load_config("ppo-qwen3-8b-1x8")
    own = {"critic.placement": "own", "critic.procs": 8, "critic.parallel.tensor": 2}
    mapped = with_values(config, own)
    plan = make_plan(job_of(mapped, read_cluster(None, 2, 8)))
    seconds = {phase.name: phase.seconds for phase in plan.phases}
    rest = sum(phase.seconds for phase in plan.phases if phase.stage == "rest")
    waited = (
        max(seconds["values"], seconds["log-probs"])
        + seconds["update actor"]
        + seconds["generation"]
        + rest
    )
    assert plan.seconds == pytest.approx(max(waited, seconds["values"] + seconds["update critic"]))
    assert plan.job.devices == 16
    actor, critic = (
        next(one for one in plan.phases if one.name == f"update {role}")
        for role in ("actor", "critic")
    )
    assert "critic weights" not in actor.memory and "actor weights" not in critic.memory


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_said() -> None:
    with pytest.raises(ConfigError, match="no mapping of rollout, actor onto 8 H100 fits"):
        auto(load_config("grpo-qwen2.5-72b-4x8"), read_cluster(None, 1, 8), Assumed(), None, False)


def test_host_memory_that_is_short_is_named() -> None:
    machines = replace(read_cluster(None, 1, 8), host_memory_gb=20)
    with pytest.raises(
        ConfigError,
        match=r"The closest mapping fails because offloaded state needs \d+ GB per node, but a node has 20 GB",
    ):
        auto(load_config("grpo-qwen3-8b-1x8"), machines, Assumed(), None, False)


@pytest.mark.slow
@pytest.mark.parametrize("each", [6, 3])
def test_an_engine_lies_on_one_node_where_nodes_have_no_power_of_two_devices(each: int) -> None:
    config = load_config(
        "grpo-qwen2.5-3b-1x8", ["data.train_batch_size=36", "actor.ppo_mini_batch_size=36"]
    )
    machines = read_cluster(None, 2, each)
    change, _ = auto(config, machines, Assumed(), None, False)
    mapped = with_values(config, change)
    assert mapped.rollout.tensor <= each and make_plan(job_of(mapped, machines)).fits


@pytest.mark.slow
def test_the_command_writes_a_recipe_that_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", "--config-name", "grpo-qwen3-8b-1x8"]
    assert main([*options, "--auto", "--write", str(tmp_path / "mapped.yaml")]) == 0
    assert main(["plan", "--config-dir", str(tmp_path), "--config-name", "mapped"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("fits")


@pytest.mark.parametrize(
    ("layers", "pipeline", "ends"),
    [
        (64, 8, (0, 0)),
        (61, 16, (3, 2)),
        (61, 8, (7, 6)),
        (61, 2, (31, 0)),
        (94, 8, (11, 11)),
        (94, 4, (23, 23)),
    ],
)
def test_the_end_stages_of_layers_that_do_not_divide_have_fewer(
    layers: int, pipeline: int, ends: tuple[int, int]
) -> None:
    assert end_stages(layers, pipeline) == ends
    counts = Coordinates(
        pp_size=pipeline, first_stage_layers=ends[0], last_stage_layers=ends[1]
    ).stage_layers(layers)
    assert sum(counts) == layers and max(counts) - min(counts) <= 2


def test_layers_that_do_not_divide_are_cut_into_a_pipeline() -> None:
    config = load_config("grpo-qwen3-235b-a22b-16x8")  # 94 layers
    training = job_of(config, read_cluster(None, 16, 8)).actor.training
    legal = cuts(
        replace(training, decoder=decoder_of({**training.decoder.hf, "num_hidden_layers": 61})), 128
    )
    assert (2, 31, 0) in {
        (cut.pipeline, cut.first_stage_layers, cut.last_stage_layers) for cut in legal
    }
    ends = {
        (cut.pipeline, cut.first_stage_layers, cut.last_stage_layers) for cut in cuts(training, 128)
    }
    assert {(2, 0, 0), (4, 23, 23), (8, 11, 11), (16, 5, 5)} <= ends
