"""Transformer Engine is used where Megatron could import it and there is a GPU, and not with
fp32."""

from __future__ import annotations

import importlib
import socket
import sys

import pytest
import torch
from packaging.version import Version

from hybridflow.config.schema import OptimConfig, ParallelConfig
from hybridflow.errors import ModelError
from hybridflow.mcore import bootstrap, model
from hybridflow.mcore.megatron_versions import transformer_engine_range
from hybridflow.mcore.optimizer import Optimizer
from hybridflow.models import family_of
from tests.models import TINY

EXTENSION = "megatron.core.extensions.transformer_engine"


@pytest.mark.parametrize(
    ("imported", "platform", "used"),
    [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)],
)
def test_it_counts_where_it_was_imported_and_a_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch, imported: bool, platform: str, used: bool
) -> None:
    monkeypatch.setattr(sys.modules[EXTENSION], "HAVE_TE", imported)
    monkeypatch.setattr(
        "hybridflow.device.platform.Platform.detect", lambda: bootstrap.Platform(platform)
    )
    # a package that cannot be imported is there
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    try:
        assert importlib.reload(bootstrap).HAVE_TRANSFORMER_ENGINE is used
    finally:
        monkeypatch.undo()
        importlib.reload(bootstrap)


def test_fp32_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "HAVE_TRANSFORMER_ENGINE", True)
    monkeypatch.setattr(model, "get_te_version", lambda: Version("2.10.0"))
    nothing: object = None
    with pytest.raises(
        ModelError, match=r"model\.dtype=float32: Transformer Engine does not support fp32"
    ):
        model.build_model(nothing, nothing, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("megatron", "version", "beyond"),
    [
        *(("0.16.1", version, "2.12") for version in ("1.13.0", "2.8.0", "2.12.0", "3.0")),
        *(("0.19.2", version, "2.21") for version in ("2.8.0", "2.21.0")),
    ],
)
def test_a_version_that_megatron_does_not_take_is_named_with_node_and_remedy(
    monkeypatch: pytest.MonkeyPatch, megatron: str, version: str, beyond: str
) -> None:
    monkeypatch.setattr(bootstrap, "MEGATRON_VERSION", megatron)
    monkeypatch.setattr(bootstrap, "HAVE_TRANSFORMER_ENGINE", True)
    monkeypatch.setattr(model, "get_te_version", lambda: Version(version))
    nothing: object = None
    said = (
        rf"Transformer Engine {version}; Megatron-Core {megatron} supports >=2\.9,<{beyond}: "
        rf".*LANE=gpu"
    )
    with pytest.raises(ModelError, match=rf"node {socket.gethostname()} has {said}"):
        model.build_model(nothing, nothing, "bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize(("megatron", "locked"), [("0.16.1", "2.10.0"), ("0.19.2", "2.20.2")])
def test_the_version_that_is_locked_is_taken(megatron: str, locked: str) -> None:
    least, beyond = transformer_engine_range(megatron)
    assert Version(least) <= Version(locked) < Version(beyond)


def test_a_dispatcher_whose_package_is_missing_is_named() -> None:
    nothing: object = None
    with pytest.raises(
        ModelError, match=rf"deepep: the package deep_ep cannot .* on node {socket.gethostname()};"
    ):
        model.build_model(nothing, ParallelConfig(expert=2, moe_dispatcher="deepep"), "bfloat16")  # type: ignore[arg-type]


def test_megatron_takes_the_settings_of_deepep_and_of_the_kernel_for_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap, "HAVE_GRADIENT_KERNEL", True)
    config = model.transformer_config(
        family_of(TINY), ParallelConfig(expert=2, moe_dispatcher="deepep"), "bfloat16"
    )
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == (
        "flex",
        "deepep",
    )
    # DeepEP takes no other
    assert config.gradient_accumulation_fusion and config.moe_router_dtype == "fp32"


@pytest.mark.parametrize(
    ("installed", "dtype", "distributed", "message"),
    [
        (
            False,
            torch.bfloat16,
            True,
            r"requires Transformer Engine's FusedAdam, which is not in use here .*LANE=gpu",
        ),
        (True, torch.float32, True, "requires model.dtype=bfloat16"),
        (True, torch.bfloat16, False, "requires parallel.distributed_optimizer=true"),
    ],
)
def test_an_adam_in_lower_precision_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    dtype: torch.dtype,
    distributed: bool,
    message: str,
) -> None:
    monkeypatch.setattr(bootstrap, "HAVE_TRANSFORMER_ENGINE", installed)
    config = OptimConfig(precision_aware=True, exp_avg_dtype="bfloat16")
    with pytest.raises(ModelError, match=message):
        Optimizer([], config, ParallelConfig(distributed_optimizer=distributed), dtype)
