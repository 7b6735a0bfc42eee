"""`rollout.quantization: fp8` as far as a CPU goes: what is refused, what an engine is told, and a
whole sync into fp8 buffers.

The sync has real senders, a real store and a real receiver; the engine is a module with SGLang's
names for scales. Its oracle quantises whole tensors block after block and knows nothing of plans.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybridflow.config.load import load_config
from hybridflow.config.model_config import with_tower
from hybridflow.device.platform import Platform
from hybridflow.engines.sglang import weight_receiver
from hybridflow.errors import ConfigError, ModelError, WeightSyncError
from hybridflow.models.fp8 import BlockQuantisation
from hybridflow.reshard.layout import Catalog, megatron_layout
from hybridflow.sync import session
from hybridflow.sync.schedule import EngineLayout, PlanFacts, make_weight_plan, post_catalog
from hybridflow.sync.session import DESCRIBE, Control
from hybridflow.trainer import app, assets
from hybridflow.trainer.check_devices import check_devices
from hybridflow.workers.rollout import check_node
from tests.models import VISION
from tests.unit.engines.bench import FAMILY, HOST, SHAPE, WAIT_S, Bench
from tests.unit.reshard.fp8_cases import forms_of

FP8 = BlockQuantisation((8, 8))
WORDS = ("rollout.quantization=fp8", "model.dtype=bfloat16")


class Gpu(Platform):
    """A platform whose devices have a certain capability."""

    def __init__(self, *capability: int) -> None:
        super().__init__("cuda")
        object.__setattr__(self, "found", capability)

    def capability(self) -> tuple[int, int]:
        return self.found  # type: ignore[attr-defined,no-any-return]

    def device_count(self) -> int:
        return 2


# ---- refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cpu_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "cpu")
    config = load_config("tiny-moe-grpo", [*WORDS, f"output_dir={tmp_path / 'runs'}"])
    with pytest.raises(
        ConfigError,
        match=(
            r"rollout.quantization=fp8 requires GPUs of compute capability 8\.9 or later.*reshard "
            r"plan"
        ),
    ):
        app.train(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("capability", "refused"),
    [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)],
)
def test_what_a_gpu_must_be_capable_of(capability: tuple[int, int], refused: bool) -> None:
    config = load_config("tiny-moe-grpo", WORDS)
    if refused:
        with pytest.raises(
            ConfigError, match=rf"node n7 have {capability[0]}\.{capability[1]}.*Marlin"
        ):
            check_node(config.rollout, Gpu(*capability), "n7")
    else:
        check_node(config.rollout, Gpu(*capability), "n7")
    check_node(load_config("tiny-moe-grpo").rollout, Gpu(*capability), "n7")
    check_node(config.rollout, Platform("cpu"), "n7")


def test_a_node_that_shows_fewer_gpus_than_an_engine_has_ranks_is_named() -> None:
    words = ["rollout.tensor=4", "rollout.nodes_per_engine=2"]
    check_node(load_config("tiny-moe-grpo", words).rollout, Gpu(9, 0), "n7")
    with pytest.raises(
        ConfigError, match=r"node n7 has 2 visible GPUs, but an engine needs 4 there"
    ):
        check_node(load_config("tiny-moe-grpo", words[:1]).rollout, Gpu(9, 0), "n7")


def test_kernels_that_write_between_gpus_are_refused_on_a_cpu() -> None:
    config = load_config("tiny-moe-grpo", ["actor.parallel.moe_dispatcher=deepep"])
    check_devices(config, "cuda")
    with pytest.raises(
        ConfigError, match=r"moe_dispatcher=deepep requires GPUs, .*use alltoall or allgather"
    ):
        check_devices(config, "cpu")


def test_gated_delta_nets_are_refused_in_servers_on_a_cpu() -> None:
    words = ["model=tiny-vlm-hybrid", "cluster=one-process"]
    config = load_config("tiny-vlm-grpo", words)
    check_devices(config, "cuda")
    with pytest.raises(
        ConfigError,
        match=r"rollout\.engine=sglang requires GPUs for model_type=qwen3_5, .*rollout\.engine=hf",
    ):
        check_devices(config, "cpu")
    for others in (["cluster=one-process"], ["model=tiny-vlm-hybrid"]):
        check_devices(load_config("tiny-vlm-grpo", others), "cpu")


def test_what_carries_weights_to_engines_on_the_trainers_gpus() -> None:
    for words in (
        ["rollout.pool=actor"],
        ["rollout.pool=actor", "rollout.sync.transport=cuda_ipc"],
    ):
        check_devices(load_config("tiny-moe-grpo", words), "cuda")
    config = load_config("tiny-moe-grpo", ["rollout.pool=actor", "rollout.sync.transport=p2p"])
    check_devices(config, "cpu")
    with pytest.raises(
        ConfigError,
        match=r"rollout\.pool=actor .* NCCL allows only one rank per GPU; use auto or cuda_ipc, or",
    ):
        check_devices(config, "cuda")
    with pytest.raises(
        ConfigError, match=r"cuda_ipc supports only CUDA buffers.*are on cpu.*use auto or p2p"
    ):
        check_devices(load_config("tiny-moe-grpo", ["rollout.sync.transport=cuda_ipc"]), "cpu")


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_transports_of_cpu_buffers_are_refused_on_gpus(transport: str) -> None:
    config = load_config("tiny-moe-grpo", [f"rollout.sync.transport={transport}"])
    check_devices(config, "cpu")
    with pytest.raises(
        ConfigError,
        match=f"rollout.sync.transport={transport} supports only CPU buffers.*use auto or cuda_ipc, p2p",
    ):
        check_devices(config, "cuda")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("cluster.nodes=2",), "cluster.nodes=2"),
        (
            ("rollout.tensor=2", "rollout.nodes_per_engine=2", "cluster.address=auto"),
            "rollout.nodes_per_engine=2",
        ),
    ],
)
def test_shared_memory_needs_one_machine(words: tuple[str, ...], why: str) -> None:
    config = load_config("tiny-moe-grpo", ["rollout.sync.transport=shared_memory", *words])
    with pytest.raises(
        ConfigError,
        match=f"shared_memory requires trainer and engines on one machine, but {why}.*tcp",
    ):
        check_devices(config, "cpu")


# ---- what an engine is told
# --------------------------------------------------------------------------------------------------


def test_an_engines_folder_says_what_it_will_receive_and_not_what_the_policy_started_from(
    tmp_path: Path,
) -> None:
    tokenizer = type("Tokenizer", (), {"path": tmp_path / "tokenizer", "eos_id": 5})()
    (tmp_path / "tokenizer").mkdir()

    def written(hf_config: dict[str, object], quantization: str | None) -> dict[str, object]:
        folder = assets.write_engine_folder(
            tmp_path / "model", hf_config, "bfloat16", tokenizer, quantization
        )
        read: dict[str, object] = json.loads((folder / "config.json").read_text())
        return read

    # or SGLang would end responses at a token at which the trainer does not
    assert written({"eos_token_id": [7, 8]}, None)["eos_token_id"] == 5
    published = {"model_type": "deepseek_v3", "quantization_config": FP8.config()}
    assert "quantization_config" not in written(published, None)
    assert written(published, "fp8")["quantization_config"] == FP8.config()
    assert (
        written({"model_type": "qwen3"}, "fp8")["quantization_config"]
        == BlockQuantisation((128, 128)).config()
    )
    # transformers takes both for granted in this family
    hf = with_tower(VISION)
    sections = hf["rope_scaling"]["mrope_section"]
    hf["rope_scaling"] = {"rope_type": "default", "mrope_section": sections}
    text: Any = written(hf, None)["text_config"]
    assert text["rope_scaling"] == {**hf["rope_scaling"], "mrope_interleaved": True}
    hf["rope_scaling"] = None
    text = written({**hf, "head_dim": 128}, None)["text_config"]
    assert text["rope_parameters"] == {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
    with pytest.raises(ModelError, match="scale_fmt"):
        written({"quantization_config": {"scale_fmt": "ue8m0"}}, "fp8")


# ---- a sync
# --------------------------------------------------------------------------------------------------


class Fp8Engine(nn.Module):
    """Every tensor as it is; those that are quantised in fp8, with their scales beside them."""

    def __init__(self) -> None:
        super().__init__()
        shapes, dtypes = FP8.checkpoint(FAMILY.tensors())
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtypes.get(name, "bfloat16")))
            self.register_parameter(
                name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False)
            )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name.replace(".", "_")).data.copy_(tensor)


class Fp8Bench(Bench):
    def plan(self) -> PlanFacts:
        self.engine = Fp8Engine()  # type: ignore[assignment]
        self.receiver = weight_receiver.receiver_of(self.engine)
        post_catalog(self.store, FAMILY.tensors(), "bfloat16", FP8)
        self.receiver.handle(Control(DESCRIBE, HOST, self.store.port, WAIT_S, "described", 0, 1))
        report = session.read_reports(self.store, "described", [0], WAIT_S)[0]
        assert report.error == ""
        source = megatron_layout(
            FAMILY, SHAPE.coordinates(), "float32", Catalog.of(FAMILY.tensors(), FP8)
        )
        engines = [EngineLayout("engine-0", (report.layout,))]
        facts = make_weight_plan(
            self.store, FAMILY, source, engines, 1 << 18, WAIT_S, quantisation=FP8
        )
        for sender in self.senders:
            sender.adopt(facts.digest, HOST, self.store.port, WAIT_S)
        return facts


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fp8Bench]:
    monkeypatch.setattr(weight_receiver, "_rank_in_engine", lambda: 0)  # SGLang is not running here
    built = Fp8Bench()
    yield built
    for sender in built.senders:
        sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("staged", [True, False])
def test_a_sync_brings_blocks_and_scales_of_the_whole_tensors_form(
    bench: Fp8Bench, staged: bool
) -> None:
    for seed in (1, 2):
        whole = bench.train(seed)
        report, outcomes, _ = bench.sync(staged=staged)
        assert report.error == "" and {outcome.status for outcome in outcomes} == {"served"}
        forms = forms_of({name: tensor.numpy() for name, tensor in whole.items()}, FP8)
        want = {name: tensor.bfloat16() for name, tensor in forms["plain"].items()} | forms["fp8"]
        for name, tensor in want.items():
            found = bench.engine.get_parameter(name.replace(".", "_"))
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
        assert report.nbytes == sum(tensor.nbytes for tensor in want.values())


def test_an_engine_that_takes_fp8_without_its_scales_has_no_plan(bench: Fp8Bench) -> None:
    """The catalog of an engine in bfloat16: its loader is never shown any scales, and the plan
    leaves them unfilled."""
    post_catalog(bench.store, FAMILY.tensors(), "bfloat16")
    receiver = weight_receiver.receiver_of(bench.engine)
    receiver.handle(Control(DESCRIBE, HOST, bench.store.port, WAIT_S, "again", 0, 1))
    report = session.read_reports(bench.store, "again", [0], WAIT_S)[0]
    source = megatron_layout(FAMILY, SHAPE.coordinates(), "float32")
    with pytest.raises(WeightSyncError, match="scale_inv"):
        make_weight_plan(
            bench.store,
            FAMILY,
            source,
            [EngineLayout("engine-0", (report.layout,))],
            1 << 18,
            WAIT_S,
        )
