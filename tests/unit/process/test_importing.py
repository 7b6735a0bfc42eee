"""Large packages are imported without garbage collection, and only by the processes that use them."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.process.importing import without_collection


def test_the_collector_is_as_before_after_the_block() -> None:
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            with pytest.raises(ImportError), without_collection():
                assert not gc.isenabled()
                raise ImportError
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()


@pytest.mark.slow
def test_a_tokenizer_is_read_without_torchs_compiler(tmp_path: Path) -> None:
    """The driver reads it before it starts anything; transformers' AutoTokenizer takes seconds."""
    write_character_tokenizer(tmp_path, "0123456789")
    code = (
        "import sys\n"
        "from hybridflow.data.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(tmp_path)!r})\n"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]"
