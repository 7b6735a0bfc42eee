"""`hybridflow plan`: what it prints, how quick it is, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config import derived
from hybridflow.config.load import load_config
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.generation import Lengths
from hybridflow.planning.job import Assumed, job_of
from hybridflow.planning.plan import Plan, make_plan, resident
from hybridflow.planning.policies import make_plans


@pytest.mark.slow
def test_a_plan_needs_no_torch_and_no_ray() -> None:
    script = (
        "import sys; from hybridflow.cli.main import main; main(['plan', '--config-name', "
        "'grpo-kimi-k2-256x8']); assert not {'torch', 'ray', 'sglang', 'megatron'} & "
        "set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("fits") and "1,026.4 billion" in done.stdout


def test_figures_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--config-name", "ppo-qwen3-8b-1x8", "--json", "--mean-response", "2000"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == pytest.approx(
        sum(phase["seconds"] for phase in found["phases"])
    )
    # all on the same devices
    ends = [(phase["begin"], phase["begin"] + phase["seconds"]) for phase in found["phases"]]
    assert sorted(begin for begin, _ in ends)[1:] == pytest.approx(
        sorted(end for _, end in ends)[:-1]
    )
    assert all(
        phase["bytes"] == pytest.approx(sum(phase["memory"].values())) for phase in found["phases"]
    )
    assert found["assumed"] == {"prompt_tokens": 512, "response_tokens": 2000}
    assert found["device_hours"] == pytest.approx(8 * found["step_seconds"] / 3600)
    assert {
        "generation",
        "log-probs",
        "values",
        "update critic",
        "update actor",
        "weight sync",
    } <= {phase["name"] for phase in found["phases"]}


@pytest.mark.slow
def test_engines_that_draft_need_more_memory() -> None:
    """Weights and cache of the head, in the engines; generation takes as long as without."""
    name = "grpo-glm-4.5-air-8x8"
    words = ["actor.mtp.train=true"]
    plain, drafting = (
        make_plan(job_of(load_config(name, [*words, *more]), read_cluster(None, 8, 8)))
        for more in ([], ["rollout.speculative.method=mtp"])
    )
    generation, with_drafts = (one.phases[0] for one in (plain, drafting))
    assert generation.name == "generation"
    head = drafting.job.engine.draft.total * 2
    assert head > 0 and plain.job.engine.draft.total == 0
    weights = (one.memory["engine weights"] for one in (with_drafts, generation))
    assert next(weights) - next(weights) == head
    assert drafting.job.engine.kv_token > plain.job.engine.kv_token
    assert with_drafts.seconds == pytest.approx(generation.seconds, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo-qwen2.5-32b-2x8", "actor.parallel.tensor=2"),
        ("grpo-qwen3-30b-a3b-4x8", "actor.parallel.expert=1"),
        ("grpo-llama-3.1-405b-28x8", "rollout.mem_fraction_static=0.3"),
        ("grpo-qwen3-14b-1x8", "rollout.num_engines=5"),
    ],
)
def test_what_does_not_fit_says_what_does(
    name: str, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config-name", name, change]) == 0
    out = capsys.readouterr().out
    assert "does not fit: " in out
    advised = out.split("fits with: ")[1].split()
    assert main(["plan", "--config-name", name, change, *advised]) == 0
    assert capsys.readouterr().out.rstrip().endswith("\nfits")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 0", "nodes=0 must be a whole number above 0"),
        ("nodes: 1.5", "nodes=1.5 must be a whole number"),
        ("devices_per_node: -8", "devices_per_node=-8"),
        ("device: H1000", "device 'H1000' not found; did you mean h100? Known: A100, H100"),
        ("devise: H100", "unknown key devise; did you mean device?"),
        ("devices: {MINE: {tflops: 100}}", "devices.MINE is missing memory_gb, memory_gbs"),
        (
            "devices: {MINE: {tflops: -1, memory_gb: 80, memory_gbs: 2000}}",
            "devices.MINE.tflops=-1",
        ),
        ("[1, 2]", "expected a mapping with device, nodes and devices_per_node"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_bad_cluster_file_is_one_message(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    arguments = [
        "plan",
        "--config-name",
        "grpo-qwen3-8b-1x8",
        "--cluster",
        str(tmp_path / "cluster.yaml"),
    ]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config-name", "grpo-qwen3-8b-1x8", "--cluster", "nowhere.yaml"],
            "nowhere.yaml: could not read it",
        ),
        (["--config-name", "grpo-qwen3-8b-1x8", "--device", "TPU"], "device 'TPU' not found"),
        (
            ["--config-name", "grpo-qwen3-8b-1x8", "--mean-response", "-1"],
            "--mean-response must be",
        ),
        (["--config-name", "grpo-qwen3-8b-1x8", "model.path=nowhere"], "model.path=nowhere"),
        (
            ["--config-name", "grpo-kimi-k2-256x8", "actor.parallel.pipeline=2"],
            "num_hidden_layers is 61",
        ),
        (
            ["--config-name", "grpo-deepseek-v3-32x8", "actor.parallel.pipeline=5"],
            "does not divide",
        ),
        (["--config-name", "tiny-moe-grpo", "model.tokenizer=nowhere"], "vocab_size"),
        ([], "--config-name is missing"),
        (["--model", "kimi-k2"], "requires --model, --trainer and --engines"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_cluster_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "device: mine\nnodes: 2\ndevices: {MINE: {tflops: 500, memory_gb: 96, memory_gbs: 3000}}\n"
    )
    options = ["plan", "--config-name", "grpo-qwen3-8b-1x8", "--json"]
    assert main([*options, "--cluster", str(tmp_path / "cluster.yaml")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device_bytes"], found["nodes"], found["fits"]) == (96e9, 2, True)


def test_a_transfer_without_a_recipe_is_the_old_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "qwen3-0.6b", "--trainer", "ranks=2,tp=2", "--engines", "tp=2", "--json"]
    assert main(["plan", *sizes]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["reshard", "plan", *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["plan_hash"] == first["plan_hash"]


@pytest.mark.parametrize(("mean", "longest"), [(500, 8192), (4096, 8192), (8000, 8192)])
def test_lengths_have_the_mean_that_is_asked_for(mean: float, longest: int) -> None:
    lengths = Lengths(mean, longest)
    assert sum(lengths.quantiles) / len(lengths.quantiles) == pytest.approx(mean, rel=0.01)
    assert max(lengths.quantiles) <= longest and lengths.weighted >= mean * 0.999


def test_more_devices_or_shorter_answers_take_less_time() -> None:
    config = load_config("grpo-qwen3-30b-a3b-4x8")
    machines = read_cluster(None, 4, 8)
    seconds = [
        make_plan(job_of(config, machines, Assumed(response=mean))).seconds
        for mean in (500, 2000, 6000)
    ]
    assert seconds == sorted(seconds)
    faster = make_plan(job_of(config, read_cluster(None, 4, 8, "H200"))).seconds
    assert faster < make_plan(job_of(config, machines)).seconds


def test_the_demo_holds_what_its_formulas_say() -> None:
    """6,000 numbers of a small model, by hand: 4 bytes of weight, 4 of gradient, 8 of moments over
    the data ranks, and with a penalty 4 of the reference."""
    run = load_config("tiny-moe-grpo", ["actor.kl_loss_coef=0.001"])
    sizes = {"vocab_size": 19, **run.model.hf_config}
    job = job_of(run, read_cluster(None, 1, 4, "cpu"), hf=sizes)
    parts = resident(job)["actor"]
    numbers = job.actor.training.numbers
    heaviest = max(numbers, key=lambda one: one.total)
    assert parts["weights"] == parts["gradients"] == 4 * heaviest.total == parts["reference"]
    assert parts["optimizer"] == 8 * heaviest.total  # one data-parallel rank


def test_policies_on_one_base_are_planned_with_one_base() -> None:
    """A plan contains the base once and, in every phase of the ranks, the other's adapters."""
    stays = [f"actor.offload.{part}=false" for part in ("weights", "gradients", "optimizer")]
    words = ["actor.lora.rank=16", "actor.kl_loss_coef=0.001", "rollout.pool=null", *stays]
    machines = read_cluster(None, 1, 8, "H100")

    def update_of(plan: Plan) -> dict[str, float]:
        return next(phase.memory for phase in plan.phases if phase.name == "update actor")

    def plans(*further: str) -> tuple[Plan, dict[str, Plan]]:
        run = load_config("grpo-qwen3-8b-1x8", [*words, *further])
        return make_plans(run, machines, Assumed(), lambda one: derived.hf_config(one.model))

    alone = update_of(plans()[0])
    shared, further = plans("+roles={tester: {base: policy}}")
    other = alone["actor gradients"] + alone["actor optimizer"]
    for plan, name in ((shared, "tester"), (further["tester"], "policy")):
        memory = update_of(plan)
        added = memory.pop(f"{name} adapters")
        assert memory == alone
        # the factors, and the reference's copy of them
        assert other < added < 2 * other < 0.2 * alone["actor weights"]
    separate, further = plans("+roles={tester: {}}")
    assert update_of(separate) == update_of(further["tester"]) == alone


@pytest.mark.slow
def test_a_step_without_a_pass_for_old_log_probs_is_planned_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def seconds(*words: str) -> float:
        assert main(["plan", "--config-name", "grpo-qwen3-8b-1x8", "--json", *words]) == 0
        phases = json.loads(capsys.readouterr().out)["phases"]
        return sum(float(phase["seconds"]) for phase in phases if phase["name"] == "log-probs")

    batch = load_config("grpo-qwen3-8b-1x8").data.train_batch_size
    half = seconds(f"actor.ppo_mini_batch_size={batch // 2}")
    assert seconds(f"actor.ppo_mini_batch_size={batch}") == 0.0 < half
    assert 1.2 * half < seconds(f"actor.ppo_mini_batch_size={batch // 4}") < 1.7 * half
