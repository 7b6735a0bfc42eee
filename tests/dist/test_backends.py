"""The contract of training backends: the same cases on Megatron and on FSDP2, against transformers
and against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridflow.config.schema import LoraConfig
from hybridflow.models import family_of
from hybridflow.models.layout import LocalTensor, ParallelShape
from hybridflow.models.lora import AdapterMap
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.fsdp_layout import fsdp_layout, fsdp_tensors
from hybridflow.reshard.layout import Catalog, Layout, megatron_layout, rank_tensors
from hybridflow.sync.schedule import plan_and_prove
from tests.dist.cases.backend import teacher_of
from tests.dist.cases.gradient import with_mask
from tests.dist.harness.oracle import oracle
from tests.dist.harness.policies import batch_of
from tests.dist.harness.ranks import FSDP, MEGATRON, run_ranks
from tests.models import DENSE, LLAMA, QWEN2_MOE, TINY
from tests.unit.reshard.reshard_cases import engine_buffers, execute

pytestmark = pytest.mark.slow
BACKENDS = ("megatron", "fsdp")
LOADED = {"megatron": MEGATRON, "fsdp": FSDP}
MODELS = {"qwen3-tied": DENSE, "llama": LLAMA}
# FSDP2's mixture is untied, too; Megatron's llama is in test_mcore.py
IN_MAKE_TEST = [
    *((backend, "qwen3-tied") for backend in BACKENDS),
    *(pytest.param(backend, "llama", marks=pytest.mark.full) for backend in BACKENDS),
    ("fsdp", "qwen3-moe"),
]
# FSDP2 shards their experts; Megatron's are the subject of test_parity.py
MIXTURES = {
    "qwen3-moe": TINY,
    "three-experts": {**TINY, "num_experts": 3},  # two on the first of two ranks
    "qwen2-moe": QWEN2_MOE,
}
ROUTED = ["linear_qkv", "linear_proj", "experts.linear_fc1", "experts.linear_fc2"]
# FSDP2 trains their adapters; Megatron's are the subject of test_lora.py
LORA: dict[str, dict[str, Any]] = {
    "adapted-dense": {"rank": 3, "alpha": 6.0},
    "adapted-experts": {"rank": 3, "alpha": 6.0, "targets": ROUTED},
}
ADAPTED = {
    "adapted-dense": {**DENSE, "tie_word_embeddings": False},
    "adapted-experts": MIXTURES["three-experts"],
}
ALL = MODELS | MIXTURES | ADAPTED
FULL_MIXTURES = [
    pytest.param("fsdp", name, marks=pytest.mark.full)
    for name in ("three-experts", "qwen2-moe", *ADAPTED)
]
RANKS = 2
TOLERANCE = 1e-5


def run_backend(backend: str, ranks: int, case: str, **arguments: Any) -> list[dict[str, Any]]:
    return run_ranks(
        ranks,
        f"tests.dist.cases.backend:{case}",
        loaded=LOADED[backend],
        backend=backend,
        **arguments,
    )


@pytest.fixture(scope="module")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`contract` of (backend, model, ranks), run when first asked for: (folder, each rank's
    result)."""
    found: dict[tuple[str, str, int], tuple[Path, list[dict[str, Any]]]] = {}

    def contract(backend: str, model: str, ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        if (backend, model, ranks) not in found:
            folder = tmp_path_factory.mktemp(f"{backend}-{model}-{ranks}")
            arguments = {"hf": ALL[model], "lora": LORA.get(model), "folder": str(folder)}
            results = run_backend(backend, ranks, "contract", **arguments)
            found[backend, model, ranks] = folder, results
        return found[backend, model, ranks]

    return contract


def joined(results: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.concatenate([result[name] for result in results])


def steps_of(results: list[dict[str, Any]], name: str = "history") -> np.ndarray:
    """[steps, 3] mean loss, gradient norm, rate."""
    history = np.array([result[name] for result in results])
    assert (history[:, :, 2:] == history[:1, :, 2:]).all()  # every rank says the same norm and rate
    return np.column_stack([history[:, :, 0].sum(0) / history[:, :, 1].sum(0), history[0, :, 2:]])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("backend", "model"),
    [*IN_MAKE_TEST, *FULL_MIXTURES],
)
def test_log_probs_and_entropies_equal_transformers(
    contracts: Any, backend: str, model: str
) -> None:
    folder, results = contracts(backend, model, RANKS)
    log_probs, entropies, _ = oracle(folder / "before", 0.7)
    assert np.abs(joined(results, "log_probs") - log_probs).max() < TOLERANCE
    assert np.abs(joined(results, "entropy") - entropies).max() < TOLERANCE
    # the frozen reference, after three updates, in another packing
    assert np.abs(joined(results, "reference") - log_probs).max() < TOLERANCE


@pytest.mark.parametrize(
    ("backend", "ranks", "model"),
    # one model is enough for a single process
    [
        *((backend, RANKS, "qwen3-tied") for backend in BACKENDS),
        *(pytest.param(backend, RANKS, "llama", marks=pytest.mark.full) for backend in BACKENDS),
        ("fsdp", 1, "qwen3-tied"),
        ("fsdp", RANKS, "qwen3-moe"),
        # four ranks with one expert each
        pytest.param("fsdp", 4, "qwen3-moe", marks=pytest.mark.full),
        *(
            pytest.param("fsdp", RANKS, name, marks=pytest.mark.full)
            for name in ("three-experts", "qwen2-moe", *ADAPTED)
        ),
    ],
)
def test_three_updates_equal_those_of_megatron_on_one_process(
    contracts: Any, backend: str, ranks: int, model: str
) -> None:
    folder, results = contracts(backend, model, ranks)
    one_folder, one = contracts("megatron", model, 1)
    expected = steps_of(one)
    np.testing.assert_allclose(steps_of(results), expected, rtol=0, atol=TOLERANCE)
    if model not in ADAPTED:
        assert expected[:, 1].min() > 1.0  # or nothing would have been clipped
    # warm-up, then cosine
    assert expected[:, 2] == pytest.approx([5e-3, 1e-2, 8.681981e-3], rel=1e-5)
    before = tensors_of(folder / "before")
    mine = tensors_of(folder / "trained")
    theirs = tensors_of(one_folder / "trained")
    family = family_of(ALL[model])
    assert mine.keys() == theirs.keys() == family.tensors().keys()
    worst = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
    assert worst < TOLERANCE
    moved = {name: float((mine[name] - before[name]).abs().max()) for name in mine}
    if model not in ADAPTED:
        assert min(moved.values()) > 100 * TOLERANCE  # all of them were trained
        return
    adapters = AdapterMap(family, LoraConfig(**LORA[model]), 1).served().factors
    assert min(moved[name] for name in adapters) > 10 * TOLERANCE
    assert {name for name, size in moved.items() if size} == set(adapters)


@pytest.mark.full
@pytest.mark.parametrize("model", ADAPTED)
def test_both_export_the_same_adapter(contracts: Any, tmp_path: Path, model: str) -> None:
    """Under PEFT's names, from checkpoints of two FSDP2 ranks and of one Megatron rank."""
    from hybridflow.saving.tools import export_adapter

    found = []
    for backend, ranks in (("fsdp", RANKS), ("megatron", 1)):
        folder, _ = contracts(backend, model, ranks)
        found.append(export_adapter(folder / "checkpoint", tmp_path / backend, None).folder)
    mine, theirs = map(tensors_of, found)
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < TOLERANCE
    one, two = ((folder / "adapter_config.json").read_text() for folder in found)
    assert one == two


@pytest.mark.full
@pytest.mark.parametrize(("backend", "tensor"), [("fsdp", 1), ("megatron", 1), ("megatron", 2)])
def test_an_update_by_distillation_is_that_of_whole_distributions(
    tmp_path: Path, backend: str, tensor: int
) -> None:
    """Loss and gradient norm on two ranks, which share the rows or the vocabulary, against
    transformers in float64."""
    from transformers import AutoModelForCausalLM

    results = run_backend(
        backend, RANKS, "distilled", hf=DENSE, folder=str(tmp_path), tensor=tensor
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    batch = with_mask(teacher_of(batch_of(12, 3), DENSE["vocab_size"], 5))
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for row in range(len(batch)):
        prompt = batch["prompt_ids"].row(row)
        response = batch["response_ids"].row(row)
        logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[
            0, len(prompt) - 1 : -1
        ]
        mask = batch["response_mask"].row(row)
        best, ids = (
            torch.tensor(batch[name].row(row)[mask])
            for name in ("teacher_top_log_probs", "teacher_top_ids")
        )
        log_probs = (logits[torch.tensor(mask)] / 0.7).log_softmax(-1).gather(-1, ids)
        total = total + (best.double().exp() * (best.double() - log_probs)).sum()
        count += len(ids)
    (total / count).backward()
    norm = float(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).norm())
    groups = results if tensor == 1 else results[:1]
    assert (
        sum(result["sums"][1] for result in groups) == count < batch.lengths("response_ids").sum()
    )
    assert sum(result["sums"][0] for result in groups) == pytest.approx(
        float(total.detach()), rel=1e-5
    )
    assert [result["norm"] for result in results] == pytest.approx([norm] * RANKS, rel=1e-5)


def test_both_write_the_same_folder(contracts: Any) -> None:
    (one, _), (two, _) = (contracts(backend, "qwen3-tied", RANKS) for backend in BACKENDS)
    assert (one / "before" / "checksums.sha256").read_text() == (
        two / "before" / "checksums.sha256"
    ).read_text()
    assert (one / "before" / "config.json").read_text() == (
        two / "before" / "config.json"
    ).read_text()


@pytest.mark.parametrize(
    ("backend", "model"),
    [*IN_MAKE_TEST, *FULL_MIXTURES],
)
def test_a_loaded_checkpoint_goes_on_as_if_nothing_had_happened(
    contracts: Any, backend: str, model: str
) -> None:
    _, results = contracts(backend, model, RANKS)
    for result in results:
        assert result["again"] == result["more"]
        assert result["resumed"]
        assert (
            "rms_norm_eps is 1e-06 in the checkpoint, 1e-05 here" in result["misfits"]["checkpoint"]
        )
        assert "not a complete checkpoint" in result["misfits"]["nothing"]


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        *((backend, "qwen3-tied") for backend in BACKENDS),
        *(
            pytest.param("fsdp", name, marks=pytest.mark.full)
            for name in ("qwen3-moe", "three-experts", "adapted-experts")
        ),
    ],
)
def test_a_checkpoint_of_two_ranks_goes_on_in_one(contracts: Any, backend: str, model: str) -> None:
    folder, results = contracts(backend, model, RANKS)
    foreign, _ = contracts(BACKENDS[1 - BACKENDS.index(backend)], model, RANKS)
    hf = ALL[model]
    arguments = {"hf": hf, "lora": LORA.get(model), "folder": str(folder)}
    found = run_backend(backend, 1, "resumed", **arguments, foreign=str(foreign))
    np.testing.assert_allclose(steps_of(found), steps_of(results, "more"), rtol=0, atol=TOLERANCE)
    for name, sums in results[0]["end"].items():
        np.testing.assert_allclose(found[0]["end"][name], sums, rtol=1e-4, atol=1e-3, err_msg=name)
    np.testing.assert_allclose(
        found[0]["reference"], joined(results, "reference"), rtol=0, atol=TOLERANCE
    )
    assert "it was written by another training backend" in found[0]["said"]
    assert "hybridflow checkpoint export" in found[0]["said"]


def test_the_tools_read_an_fsdp_checkpoint(contracts: Any, tmp_path: Path) -> None:
    from hybridflow.saving.tools import export, inspect, verify

    folder, _ = contracts("fsdp", "qwen3-tied", RANKS)
    assert verify(folder / "checkpoint")[1] == []
    parts = inspect(folder / "checkpoint")["parts"]
    assert parts.keys() == {
        "model",
        "optimizer exp_avg",
        "optimizer exp_avg_sq",
        "reference",
        "random state",
    }
    export(folder / "checkpoint", tmp_path / "hf", None, 1 << 20, None)
    exported = tensors_of(tmp_path / "hf")
    trained = tensors_of(folder / "trained")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


@pytest.mark.parametrize("model", ["qwen3-moe", pytest.param("qwen3-tied", marks=pytest.mark.full)])
def test_layers_that_are_computed_twice_train_the_same(model: str) -> None:
    arguments = {"hf": ALL[model], "lora": LORA.get(model)}
    results = run_backend("fsdp", RANKS, "recomputed", **arguments)
    for result in results:
        none = result["none"]
        full = result["full"]
        assert none["passes"] == [1, 1]
        assert full["passes"] == [2, 1]
        np.testing.assert_allclose(full["history"], none["history"], rtol=0, atol=1e-6)
        for name, sums in none["end"].items():
            np.testing.assert_allclose(full["end"][name], sums, rtol=1e-6, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        *((backend, "qwen3-tied") for backend in BACKENDS),
        pytest.param("fsdp", "qwen3-moe", marks=pytest.mark.full),
    ],
)
def test_updates_do_not_depend_on_packing_and_a_nan_changes_nothing(
    backend: str, model: str
) -> None:
    for result in run_backend(backend, RANKS, "updates", hf=ALL[model]):
        masked = result["masked"]
        assert (
            np.isfinite(masked["one"]).all() and masked["true"] == masked["none"] != masked["one"]
        )
        np.testing.assert_allclose(masked["one"], masked["many"], rtol=1e-5, atol=1e-6)
        assert result["norm"] < 1e-6
        assert result["weights"] < 1e-6
        assert result["moved"] > 1e-4
        assert result["sum"] == pytest.approx(1, rel=1e-5)
        assert "the loss is not finite: rank 1 micro-batch 1" in result["poisoned"]["said"]
        assert result["poisoned"]["unchanged"]
        memory = result["memory"]
        assert memory["equal"]
        assert memory["freed"] == sum(memory["held"].values()) - sum(memory["left"].values()) > 0
        assert all(
            memory["left"][part] < size
            for part, size in memory["held"].items()
            if part != "gradients"
        )
        assert result["unequal"][0] == result["unequal"][1]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_first_update_computes_what_a_pass_before_it_would(backend: str) -> None:
    """Its own log-probs may stand in for old_log_probs: the same values, gradients and metrics, and
    a ratio of 1."""
    for result in run_backend(backend, RANKS, "own_values", hf=DENSE):
        scored = result["scored"]
        own = result["own"]
        np.testing.assert_array_equal(own["old_log_probs"], scored["old_log_probs"])
        np.testing.assert_allclose(own["old_log_probs"], result["pass"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(
            own["entropys"], result["pass_entropies"], rtol=0, atol=TOLERANCE
        )
        assert own["norm"] == pytest.approx(scored["norm"], rel=1e-5) and own["norm"] > 1e-3
        assert own["sums"]["actor/ppo_kl"][0] == 0
        assert own["sums"].keys() == scored["sums"].keys()
        for name, pair in own["sums"].items():
            assert pair == pytest.approx(scored["sums"][name], rel=1e-5, abs=1e-5), name


def test_two_ranks_train_on_the_mini_batches_of_one() -> None:
    """Mini-batches drawn from each rank's share would differ, and gradient norms with them."""
    [[one], *two] = (run_backend("megatron", ranks, "drawn", hf=DENSE) for ranks in (1, RANKS))
    for rank in two[0]:
        np.testing.assert_allclose(rank, one, rtol=1e-5, atol=TOLERANCE)


def test_bf16_keeps_fp32_weights_and_learns(tmp_path: Path) -> None:
    results = run_backend("fsdp", RANKS, "low_precision", hf=DENSE, folder=str(tmp_path / "hf"))
    [exact] = run_backend("megatron", 1, "low_precision", hf=DENSE, folder=str(tmp_path / "other"))
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "hf").values()} == {torch.bfloat16}
    assert np.abs(joined(results, "log_probs") - exact["log_probs"]).max() < 0.05
    for result in results:
        assert result["dtypes"] == ["torch.float32"]
        assert result["losses"][-1] < result["losses"][0]


# ---- weights to the engines
# --------------------------------------------------------------------------------------------------


def sources(backend: str, hf: dict[str, Any]) -> tuple[Layout, list[list[LocalTensor]]]:
    family = family_of(hf)
    if backend == "fsdp":
        return fsdp_layout(family, RANKS, "float32"), [
            fsdp_tensors(family, rank, RANKS) for rank in range(RANKS)
        ]
    ranks = ParallelShape(RANKS).coordinates()
    return megatron_layout(family, ranks, "float32"), [rank_tensors(family, at) for at in ranks]


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        *((backend, "llama") for backend in BACKENDS),
        pytest.param("fsdp", "three-experts", marks=pytest.mark.full),
    ],
)
def test_the_slice_plan_brings_whole_tensors_from_live_memory_to_engines(
    tmp_path: Path, backend: str, model: str
) -> None:
    """Two engines at once, of TP 2 and of TP 1."""
    hf = ALL[model]
    run_backend(backend, RANKS, "held", hf=hf, folder=str(tmp_path))
    held = [dict(np.load(tmp_path / f"rank{rank}.npz")) for rank in range(RANKS)]
    source, described = sources(backend, hf)
    assert [{name: tensor.shape for name, tensor in rank.items()} for rank in held] == [
        {local.name: local.shape for local in rank} for rank in described
    ]
    family: Any = family_of(hf)
    catalog = Catalog.of(family.tensors())
    target = engine_layout(family, (EngineShape(tensor=2), EngineShape()), "float32")
    plan, proof = plan_and_prove(catalog, source, target, 1 << 16)
    assert proof.unused == ()
    weights = {name: tensor.numpy() for name, tensor in tensors_of(tmp_path / "hf").items()}
    got = engine_buffers(target, catalog, None)
    expected = engine_buffers(target, catalog, weights)
    execute(plan, held, got)
    for rank, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        for name in wanted:
            np.testing.assert_array_equal(
                mine[name], wanted[name], err_msg=f"engine rank {rank}, {name}"
            )
