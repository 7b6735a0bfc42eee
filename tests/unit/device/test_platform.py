"""The cpu platform as it is; the cuda platform as far as it can be told without a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.device.platform import Platform
from hybridflow.errors import ResourceError


def test_cpu_is_detected_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Platform.detect() == Platform("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Platform.detect() == Platform("cuda")
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "cpu")
    assert Platform.detect() == Platform("cpu")


def test_asking_for_what_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "cuda")
    with pytest.raises(ResourceError, match="sees no CUDA device"):
        Platform.detect()
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "tpu")
    with pytest.raises(ResourceError, match="must be cpu or cuda"):
        Platform.detect()


def test_a_driver_too_old_for_torch_is_named_with_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:  # torch's words
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12040). Please update "
            "it.\nMore"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    monkeypatch.setenv("HYBRIDFLOW_PLATFORM", "cuda")
    with pytest.raises(
        ResourceError, match=r"node-7 .*too old \(found version 12040\).*update this node's driver"
    ):
        Platform.detect()


def test_names_follow_the_kind() -> None:
    assert (Platform("cpu").collective_backend, Platform("cpu").device(3)) == (
        "gloo",
        torch.device("cpu"),
    )
    assert Platform("cpu").current_device() == torch.device("cpu")
    assert (Platform("cuda").collective_backend, Platform("cuda").device(3)) == (
        "nccl",
        torch.device("cuda", 3),
    )


def test_memory_grows_with_what_is_held() -> None:
    cpu = Platform("cpu")
    before = cpu.memory_bytes()
    held = np.ones(64 << 20, dtype=np.uint8)
    grown = cpu.memory_bytes() - before
    assert 48 << 20 < grown < 128 << 20
    assert before < cpu.memory_bytes() <= cpu.peak_memory_bytes() <= cpu.total_memory_bytes()
    assert held.nbytes == 64 << 20
    cpu.synchronize()
    cpu.empty_cache()
    cpu.set_device(0)


def test_the_peak_starts_anew_when_reset() -> None:
    cpu = Platform("cpu")
    cpu.reset_peak_memory()  # other tests of this process have had theirs
    held = np.ones(96 << 20, dtype=np.uint8)
    high = cpu.peak_memory_bytes()
    del held
    cpu.empty_cache()
    cpu.reset_peak_memory()
    assert cpu.peak_memory_bytes() < high - (64 << 20)
    held = np.ones(64 << 20, dtype=np.uint8)
    assert cpu.peak_memory_bytes() >= high - (48 << 20) and held[0] == 1
    assert cpu.reserved_memory_bytes() >= cpu.memory_bytes() - (8 << 20)
