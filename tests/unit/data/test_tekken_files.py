"""Mistral's tokenizer from a `tekken.json` alone, against its rules written out."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.data.chat_template import Exchange
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import DataError
from tests.published.texts import mixed_texts
from tests.published.tokenizers import TEKKEN_SPECIALS, TEKKEN_SPLIT, write_tekken
from tests.unit.data.rank_oracle import RankOracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    write_tekken(folder)
    return folder


def test_ids_are_those_of_the_published_rules_on_mixed_texts(folder: Path) -> None:
    written = json.loads((folder / "tekken.json").read_text())
    size = written["config"]["default_vocab_size"]
    tokens = [base64.b64decode(one["token_bytes"]) for one in written["vocab"]][: size - 40]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    specials = {token: rank for rank, token in enumerate(TEKKEN_SPECIALS)}
    oracle = RankOracle(ranks, specials, TEKKEN_SPLIT, first=40)
    found = load_tokenizer(folder)
    assert found.vocab_size == size and found.eos_id == 2 and found.pad_id == 11
    assert found.stop_ids == (2,)
    texts = mixed_texts(300, ("[INST]", "</s>", "[TOOL_CALLS]"), seed=3)
    assert sum("[INST]" in text for text in texts) > 20
    for text in texts:
        ids = found.encode(text)
        assert ids == oracle.encode(text), text
        assert found.decode([*ids, 1]) == f"{text}<s>"


def test_a_conversation_is_rendered_by_the_folders_template(folder: Path) -> None:
    found = load_tokenizer(folder)
    ids = found.encode_chat([{"role": "user", "content": "Say yes."}])
    assert ids == [1, 3, *found.encode("Say yes."), 4]
    ended = found.continuation([Exchange([{"role": "user", "content": "And no."}])], last=2)
    assert ended == [3, *found.encode("And no."), 4]


def test_a_tokenizer_json_comes_first(folder: Path, tmp_path: Path) -> None:
    write_tekken(tmp_path)
    hf = load_tokenizer(folder)._hf
    hf.add_tokens(["[OWN]"])
    hf.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("[OWN]") == [load_tokenizer(folder).vocab_size]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # 2024's files, whose special tokens are in mistral-common
        ({"special_tokens": None}, "mistral-common is needed to read it; copy .*tokenizer.json"),
        ({"config": {}}, "not a valid Mistral tokenizer .*'pattern'.*download it again"),
        ({"vocab": [{"rank": 0}]}, "not a valid Mistral tokenizer .*'token_bytes'"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common", None)  # not installed
    write_tekken(tmp_path)
    file = tmp_path / "tekken.json"
    whole = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    with pytest.raises(DataError, match=f"tekken.json.*{message}"):
        load_tokenizer(tmp_path)
