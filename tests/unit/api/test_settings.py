"""Python values as words of the command line: read back, they are the same values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.api.settings import text, words
from hybridflow.config.load import load_config
from hybridflow.errors import ConfigError

TEXTS = st.text(st.sampled_from("ab0.5\"'\\ ,{}[]:=()$#%~\n\té@/-nulltrue"), max_size=9)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner)
)


@pytest.mark.slow
@given(VALUES)
def test_a_value_is_read_back_as_it_was(value: Any) -> None:
    found = OverridesParser.create().parse_override(f"++a.b={text(value, 'a.b')}").value()
    assert found == value and type(found) is type(value)


def test_nested_and_dotted_keys_are_the_same() -> None:
    nested = {"trainer": {"total_steps": 5, "loggers": ["jsonl"]}, "cluster": "in-process"}
    dotted = {"trainer.total_steps": 5, "trainer": {"loggers": ("jsonl",)}, "cluster": "in-process"}
    one, two = (load_config("e2e", words(given)) for given in (nested, dotted))
    assert one == two and one.trainer.total_steps == 5 and one.cluster.in_process


def test_a_dictionary_that_is_a_value_stays_one() -> None:
    assert words({"reward": {"kwargs": {"a": 1, "b": [True, None]}}}) == [
        "reward.kwargs={a: 1, b: [true, null]}"
    ]
    config = load_config("e2e", words({"data": {"chat_template_kwargs": {"x": "1e-3"}}}))
    assert config.data.chat_template_kwargs == {"x": "1e-3"}


def test_what_is_no_plain_data_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"actor.optim.lr must be .*; got object"):
        words({"actor": {"optim": {"lr": object()}}})
    with pytest.raises(ConfigError, match=r"reward.kwargs: dictionary key 'a b'"):
        words({"reward": {"kwargs": {"a b": 1}}})


def test_a_path_is_a_text() -> None:
    assert text(Path("a b/c"), "k") == '"a b/c"'


@pytest.mark.slow
def test_checking_a_run_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, hybridflow as hf\n"
        "run = hf.Run(recipe='e2e', cluster='in-process', reward=lambda **row: 1.0,\n"
        f"             output_dir={str(tmp_path)!r})\n"
        "print(sorted({'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "[]"
