"""Transformer Engine is used where Megatron could import it and there is a GPU, and not with fp32."""

from __future__ import annotations

import importlib
import sys

import pytest

from hybridflow.errors import ModelError
from hybridflow.mcore import bootstrap, model

EXTENSION = "megatron.core.extensions.transformer_engine"


@pytest.mark.parametrize(
    ("imported", "platform", "used"), [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)]
)
def test_it_counts_where_it_was_imported_and_a_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch, imported: bool, platform: str, used: bool
) -> None:
    monkeypatch.setattr(sys.modules[EXTENSION], "HAVE_TE", imported)
    monkeypatch.setattr("hybridflow.device.platform.Platform.detect", lambda: bootstrap.Platform(platform))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # a package that cannot be imported is there
    try:
        assert importlib.reload(bootstrap).HAVE_TRANSFORMER_ENGINE is used
    finally:
        monkeypatch.undo()
        importlib.reload(bootstrap)


def test_fp32_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "HAVE_TRANSFORMER_ENGINE", True)
    nothing: object = None
    with pytest.raises(ModelError, match=r"model\.dtype=float32: Transformer Engine has no attention"):
        model.build_model(nothing, nothing, "float32")  # type: ignore[arg-type]
