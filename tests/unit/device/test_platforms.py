"""What differs between CPUs and GPUs is listed, and what exists for CPUs alone is off on a GPU."""

from __future__ import annotations

import pytest

from hybridflow.models import family_of
from tests import platforms
from tests.models import DEEPSEEK


def test_the_document_lists_every_setting_that_differs() -> None:
    assert platforms.DOCUMENT.read_text(encoding="utf-8") == platforms.table(), (
        "write it: python -m tests.platforms"
    )


def test_what_exists_for_cpus_is_off_on_gpus() -> None:
    from hybridflow.engines.sglang import server

    for transformer_engine in (False, True):
        found = platforms.settings("cuda", transformer_engine)
        for name in (
            "--device",
            "TORCH_COMPILE_DISABLE",
            "SGLANG_CPU_OMP_THREADS_BIND",
            "OMP_NUM_THREADS",
        ):
            assert f"SGLang: {name}" not in found
        assert "SGLang: CUDA_VISIBLE_DEVICES" not in found
        assert (
            found["Megatron: use_cpu_initialization"] is False
            and found["`Platform.cache_bytes`"] == 0
        )
        assert found["SGLang: --enable-memory-saver"] is True
    assert server.sglang_environment("cuda").keys() < server.sglang_environment("cpu").keys()


def test_a_fusion_that_would_change_results_is_left_out() -> None:
    """The kernel of rotary embeddings takes no factor of cosines and sines, which YaRN has."""
    from hybridflow.mcore.model import device_settings

    assert device_settings(family_of(DEEPSEEK), True, True)["apply_rope_fusion"] is False


@pytest.mark.parametrize(
    ("factor", "sections", "is_fused"), [(1.0, (), True), (1.2, (), False), (1.0, (8, 4, 4), False)]
)
def test_rope_is_fused_where_its_kernel_computes_the_same(
    factor: float, sections: tuple[int, ...], is_fused: bool
) -> None:
    from types import SimpleNamespace

    from hybridflow.mcore.model import device_settings

    rotary = SimpleNamespace(attention_factor=factor, sections=sections)
    family: object = SimpleNamespace(megatron_config=dict, rotary=rotary)
    for transformer_engine in (True, False):
        settings = device_settings(family, True, transformer_engine)  # type: ignore[arg-type]
        assert settings["apply_rope_fusion"] is is_fused
