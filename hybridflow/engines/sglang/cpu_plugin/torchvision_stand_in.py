"""Stand-in for the three torchvision modules that SGLang imports at module scope but never calls
for a text model.

sglang/srt/configs/deepseek_ocr.py:7-8 imports `InterpolationMode` and `functional` unconditionally,
and that file is part of SGLang's model-config registry. The package index's torchvision is built
for CUDA torch and cannot be imported with CPU torch.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
import types


def _add_module(name: str, **attributes: object) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def install() -> None:
    """Register the stand-in unless a real torchvision exists. Idempotent."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    # transformers checks with find_spec and caches the result
    # (transformers/utils/import_utils.py:847-856). It would find a registered stand-in and then
    # fail on missing parts, so trigger its check first.
    from transformers.utils import is_torchvision_available, is_torchvision_v2_available

    is_torchvision_available()
    is_torchvision_v2_available()
    InterpolationMode = enum.Enum(
        "InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
    )
    _add_module("torchvision")
    _add_module("torchvision.transforms", InterpolationMode=InterpolationMode)
    _add_module("torchvision.transforms.functional", InterpolationMode=InterpolationMode)
