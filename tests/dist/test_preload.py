"""What processes of a run find loaded: what their role needs, and nothing of another's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.process.fork_client import fork
from hybridflow.trainer.preload import Preload

pytestmark = pytest.mark.slow
SCRIPT = """
import json, sys
import torch
wanted = ("torch", "ray", "megatron.core", "sglang", "transformers", "hybridflow.mcore.cpu_compat")
names = [name for name in wanted if name in sys.modules]
print(json.dumps({"modules": names, "threads": torch.get_num_threads()}))
"""


def test_a_role_finds_its_own_libraries_loaded_and_no_others(tmp_path: Path) -> None:
    script, found = tmp_path / "loaded.py", {}
    script.write_text(SCRIPT)
    with Preload(load_config("tiny-moe-grpo"), with_engines=True) as preload:
        for number, kind in enumerate(("torch", "ranks", "engines"), 1):
            out = tmp_path / kind
            with open(out, "wb") as file, open(os.devnull, "rb") as nothing:
                files, env = (nothing.fileno(), file.fileno(), 2), {**os.environ, "OMP_NUM_THREADS": str(number)}
                assert fork(preload.name(kind), [str(script)], env, files).wait(120) == 0
            found[kind] = json.loads(out.read_text().splitlines()[-1])
    assert found["torch"] == {"modules": ["torch"], "threads": 1}
    assert found["ranks"] == {"modules": ["torch", "megatron.core", "hybridflow.mcore.cpu_compat"], "threads": 2}
    assert found["engines"] == {"modules": ["torch", "sglang", "transformers"], "threads": 3}
