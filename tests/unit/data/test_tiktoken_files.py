"""Kimi's and Moonlight's tokenizer against the published rules, written out: `regex` splits, pairs
are merged one by one."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from hybridflow.data.tiktoken_files import is_tiktoken_folder, parts_of, read_tiktoken
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import DataError
from tests.published.texts import mixed_texts
from tests.published.tokenizers import KIMI_RESERVED, KIMI_SPLIT, write_tokenizer
from tests.unit.data.rank_oracle import RankOracle


def oracle_of(folder: Path) -> RankOracle:
    lines = [line.split() for line in (folder / "tiktoken.model").read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    named = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    first = len(ranks)
    specials = {
        named.get(str(number), {"content": f"<|reserved_token_{number}|>"})["content"]: number
        for number in range(first, first + KIMI_RESERVED)
    }
    return RankOracle(ranks, specials, KIMI_SPLIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    write_tokenizer("kimi-k2", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.full)])
def test_ids_are_those_of_the_published_rules_on_mixed_texts(count: int, folder: Path) -> None:
    oracle = oracle_of(folder)
    found = read_tiktoken(folder)
    specials = (
        "<|im_end|>",
        "[BOS]",
        "<|im_user|>",
        "[EOT]",
        f"<|reserved_token_{len(oracle.ranks) + 30}|>",
    )
    texts = mixed_texts(count, specials, seed=3)
    assert (
        sum(len(text) > 1000 for text in texts) > count // 200
        and sum("<|im_end|>" in text for text in texts) > count // 10
    )
    for text in texts:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text), text
        assert (
            found.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
        )
    for text in texts[::10]:
        plain = found.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert plain == oracle.encode(text, specials=False), text


@pytest.mark.parametrize(
    "text",
    ["", "ſ's", "don'ſ", "A" * 4000, "é" * 999, "中" * 1500, "1" * 1000, " " * 2000, "\n" * 999],
)
def test_ids_of_texts_at_the_pattern_s_edges(text: str, folder: Path) -> None:
    assert read_tiktoken(folder).encode(text, add_special_tokens=False) == oracle_of(folder).encode(
        text
    )


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("a" * 25_000, [25_000]),
        ("a" * 25_001, [25_000, 1]),
        ("b " + "a" * 60_000 + " c", [25_002, 25_000, 10_002]),
        (" " * 50_000, [25_000, 25_000]),
        ("ab " * 200_000, [400_000, 200_000]),
        ("", []),
    ],
)
def test_long_texts_and_runs_are_cut_as_the_published_code_cuts_them(
    text: str, lengths: list[int], folder: Path
) -> None:
    parts = list(parts_of(text))
    assert "".join(parts) == text and [len(part) for part in parts] == lengths
    if 0 < len(text) < 30_000:
        oracle = oracle_of(folder)
        expected = [token for part in parts for token in oracle.encode(part)]
        assert read_tiktoken(folder).encode(text, add_special_tokens=False) == expected


def test_the_loaded_tokenizer_knows_its_special_tokens(folder: Path) -> None:
    found = load_tokenizer(folder)
    first = len(oracle_of(folder).ranks)
    assert is_tiktoken_folder(folder)
    assert (found.eos_id, found.pad_id, found.vocab_size) == (
        first + 1,
        first + 255,
        first + KIMI_RESERVED,
    )
    # [EOS], and <|im_end|> behind an assistant's text
    assert found.stop_ids == (first + 1, first + 2)
    assert (
        found.encode("<|im_end|>") == [first + 2]
        and found.decode([first + 20]) == f"<|reserved_token_{first + 20}|>"
    )
    ids = found.encode_chat([{"role": "user", "content": "1 + 1?"}])
    assert ids[0] == first + 10 and ids[-1] == first + 17 and ids.count(first + 2) == 2


def change(folder: Path, target: Path, **config: object) -> Path:
    target.mkdir()
    (target / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    found = json.loads((folder / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**found, **config}))
    return target


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"!!!! 5", r"tiktoken\.model, line 3: expected a base64 token and its rank"),
        (b"YWI=", r"tiktoken\.model, line 3: expected a base64 token and its rank"),
        (b"AAEC -1", r"expected each rank from 0 to 479 exactly once; is the file complete\?"),
        (b"AAEC 99999999999999999999", "expected each rank from 0 to 479"),
        (
            base64.b64encode(b"a" * 600) + b" 2",
            r"line 3: expected a token of 1 to 512 bytes, got 600",
        ),
        (None, r"expected each rank from 0 to 478|has no token for 1 bytes, for example"),
    ],
)
def test_a_wrong_line_of_ranks_is_named(
    line: bytes | None, message: str, folder: Path, tmp_path: Path
) -> None:
    spoiled = change(folder, tmp_path / "spoiled")
    lines = (spoiled / "tiktoken.model").read_bytes().splitlines()
    lines[2:3] = [] if line is None else [line]
    (spoiled / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=message):
        load_tokenizer(spoiled)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tokenizer_class": "QWenTokenizer"},
            r"tokenizer_class 'QWenTokenizer' is not supported; .* Add a tokenizer\.json to",
        ),
        (
            {"added_tokens_decoder": [1]},
            r"added_tokens_decoder must have the form \{id: \{content: token\}\}",
        ),
        (
            {"added_tokens_decoder": {"3": {"content": "x"}}},
            "do both files belong to the same model",
        ),
        (
            {"added_tokens_decoder": {"99999999": {"content": "x"}}},
            "do both files belong to the same model",
        ),
        (
            {"added_tokens_decoder": {"480": {"content": "x"}, "481": {"content": "x"}}},
            "lists a token under several ids",
        ),
        ({"eos_token": None}, "has no eos_token"),
    ],
)
def test_a_wrong_config_of_a_tiktoken_folder_is_named(
    config: dict[str, object], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load_tokenizer(change(folder, tmp_path / "spoiled", **config))


def test_a_tiktoken_folder_without_its_config_is_named(folder: Path, tmp_path: Path) -> None:
    spoiled = change(folder, tmp_path / "spoiled")
    (spoiled / "tokenizer_config.json").unlink()
    with pytest.raises(
        DataError, match=r"could not read .*tokenizer_config\.json .* lists the special tokens"
    ):
        load_tokenizer(spoiled)
