"""The modules that every SGLang server imports, whatever its model. Fork servers
(`process.fork_server`) import this module. Their imports are most of the time before an engine's
first answer, so this module also avoids two repeated searches.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.device.platform import Platform
from hybridflow.engines.sglang.server import sglang_environment

# tokenizer and configuration are in the run's folder
os.environ.update(sglang_environment(Platform.detect().kind), HF_HUB_OFFLINE="1")

import transformers
from transformers.utils import import_utils

_MODELS = Path(transformers.__file__).parent / "models"
_HOOKED = ("sglang", "hybridflow")  # packages whose modules import functions of SGLang
_search = import_utils.define_import_structure


def model_files(module_path: str, prefix: str | None = None) -> Any:
    """Return transformers' table of its models' files and classes, {required packages: {file:
    classes}}, without reading 2,000 files again.

    `transformers/__init__.py` builds the table with the prefix `models`, and
    `transformers/models/__init__.py` builds it again without a prefix.
    """
    if prefix is not None or Path(module_path) != _MODELS / "__init__.py":
        return _search(module_path, prefix)
    return {
        packages: {
            name.removeprefix("models."): classes
            for name, classes in files.items()
            if name.startswith("models.")
        }
        for packages, files in _search(_MODELS, prefix="models").items()
    }


def replace_imported(original: object, wrapped: object, defining: ModuleType | type) -> int:
    """Replace a hooked function in the modules that have imported it by name. Returns the number of
    replacements. SGLang's own version searches the variables of all 6,000 loaded modules for each
    hook (sglang/srt/plugins/hook_registry.py:320).
    """
    count = 0
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _HOOKED or module is defining or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, wrapped)
                count += 1
    return count


import_utils.define_import_structure = model_files

from sglang.srt.plugins import hook_registry, load_plugins  # noqa: E402

hook_registry._propagate_patch = replace_imported
load_plugins()  # before importing the patched modules, like sglang/launch_server.py

import sglang.launch_server  # noqa: E402
import sglang.srt.entrypoints.http_server  # noqa: E402, F401
