"""Tokens made by several processes, and those that are kept for later runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config.schema_data import DataConfig, SftConfig
from hybridflow.data import token_cache, tokenizing
from hybridflow.data.dataset import PromptDataset, SftDataset
from hybridflow.data.encoding import Encoded
from hybridflow.data.files import Row
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from tests.unit.data.chat_tokenizers import TEMPLATES, tokenizer_with

CONFIG = DataConfig(max_prompt_length=1024)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tokenizer_with(TEMPLATES["moonshotai-Kimi-K2"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for this test, of files of any size, and processes for the rows after the eighth."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "_LEAST_BYTES", 0)
    monkeypatch.setattr(tokenizing, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(tokenizing, "_ROWS_HERE", 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path / "cache" / "hybridflow" / "tokens"


def rows_of(count: int, long: Sequence[int] = ()) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "mine",
            "prompt": [
                {"role": "user", "content": f"What is {number}?" + " more" * 400 * (number in long)}
            ],
            "reward_model": {"ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.parquet") -> list[Path]:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return [folder / name]


def contents(dataset: PromptDataset | SftDataset) -> list[Any]:
    batch = dataset.batch(np.arange(len(dataset)))
    names = [name for name in batch.columns if name != "index"]
    return [
        [
            np.asarray(
                batch[name].row(n) if name.endswith(("_ids", "_mask")) else batch[name][n]
            ).tolist()
            for name in names
        ]
        for n in range(len(batch))
    ]


class Counted(Tokenizer):
    """Counts what this process encodes; the calls of other processes are those of their copies."""

    calls = 0

    def encode(self, text: str) -> list[int]:
        Counted.calls += 1
        return super().encode(text)


@pytest.fixture
def counted(tokenizer: Tokenizer) -> Tokenizer:
    Counted.calls = 0
    tokenizer.__class__ = Counted
    return tokenizer


# ---- processes


def test_several_processes_make_the_tokens_of_one(
    tmp_path: Path, counted: Tokenizer, monkeypatch: Any
) -> None:
    files = write(tmp_path / "data", rows_of(39, long=(3, 17, 38)))
    config = replace(CONFIG, filter_overlong_prompts=True, cache_tokens=False)
    several = PromptDataset(files, counted, config)
    assert Counted.calls == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    one = PromptDataset(files, counted, config)
    assert contents(several) == contents(one) and len(one) == 36
    assert several.places == one.places and several.places[-1].endswith("row 37")
    assert (several.num_filtered, one.num_filtered) == (3, 3)
    assert Counted.calls == 8 + 39


@pytest.mark.slow
def test_the_first_wrong_row_is_named_whichever_process_finds_it(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = rows_of(60)
    for number in (22, 50):
        rows[number]["prompt"] = []
    rows[12]["reward_model"] = {"ground_truth": None}
    files = write(tmp_path / "data", rows)
    with pytest.raises(DataError, match=r"row 12, column 'reward_model'"):
        PromptDataset(files, tokenizer, CONFIG)
    rows[12]["reward_model"] = {"ground_truth": "12"}
    with pytest.raises(DataError, match=r"row 22, column 'prompt'"):
        PromptDataset(write(tmp_path / "data", rows), tokenizer, CONFIG)
    assert len(PromptDataset(write(tmp_path / "data", rows), tokenizer, CONFIG, max_rows=20)) == 20


class Dies:
    """Ends the process that encodes row 11, or takes too long over it."""

    columns = ("prompt_ids",)
    reads = ()

    def __init__(self, tokenizer: Tokenizer, seconds: float) -> None:
        self.tokenizer = tokenizer
        self.seconds = seconds

    def encode(self, row: Row) -> Encoded:
        if row.number == 11:
            time.sleep(self.seconds)
            os._exit(9)
        return Encoded([{"prompt_ids": [row.number]}])


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_a_process_that_ends_or_hangs_is_said(
    tokenizer: Tokenizer, monkeypatch: Any, seconds: float
) -> None:
    monkeypatch.setattr(tokenizing, "_LIMIT_S", 1)
    rows = [Row("rows.parquet", number, {}) for number in range(20)]
    with pytest.raises(DataError, match=r"rows\.parquet: the process encoding rows from 8 on died"):
        list(tokenizing.pieces(rows, Dies(tokenizer, seconds)))


# ---- the cache


def test_a_second_start_encodes_nothing(tmp_path: Path, counted: Tokenizer, cache: Path) -> None:
    files = write(tmp_path / "data", rows_of(30, long=(2, 9)))
    config = replace(CONFIG, truncation="right")
    first = PromptDataset(files, counted, config)
    calls = Counted.calls
    second = PromptDataset(
        write(tmp_path / "elsewhere", rows_of(30, long=(2, 9)), "named.parquet"), counted, config
    )
    assert Counted.calls == calls > 0
    assert contents(second) == contents(first)
    assert (second.num_truncated, first.num_truncated) == (2, 2)
    assert second.places[3].endswith("named.parquet, row 3")
    [entry] = cache.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent)] == [
        0o700,
        0o755 & ~_umask(),
    ]
    assert entry.suffix == ".parquet"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_conversations_are_kept_with_all_their_rows(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATES["Qwen-Qwen3-0.6B"])
    chat = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b")) * 2
    ]
    files = write(
        tmp_path / "data", [{"chat": chat[: 2 + 2 * (number % 2)]} for number in range(21)]
    )
    made = [SftDataset(files, tokenizer, CONFIG, SftConfig(messages_key="chat")) for _ in range(2)]
    assert contents(made[0]) == contents(made[1])
    assert len(made[1]) == 31 and made[1].places == made[0].places


CHANGES = {
    "content": lambda rows, config, tokenizer: (rows_of(31), config, tokenizer),
    "a key": lambda rows, config, tokenizer: (
        rows,
        replace(config, max_prompt_length=512),
        tokenizer,
    ),
    "a template": lambda rows, config, tokenizer: (
        rows,
        config,
        tokenizer_with(TEMPLATES["MiMo-VL"]),
    ),
    "what the template is given": lambda rows, config, tokenizer: (rows, config, _given(tokenizer)),
    "the tokenizer": lambda rows, config, tokenizer: (rows, config, _other_merges(tokenizer)),
}


def _given(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer.with_template({"tools": []})


def _other_merges(tokenizer: Tokenizer) -> Tokenizer:
    """The same vocabulary with another normalizer."""
    from tokenizers import normalizers

    tokenizer._hf.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_tokens_follow_from_is_noticed(
    change: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = rows_of(30)
    PromptDataset(write(tmp_path / "data", rows), tokenizer, CONFIG)
    changed, config, other = CHANGES[change](rows, CONFIG, tokenizer)
    Counted.calls = 0
    other.__class__ = Counted
    PromptDataset(write(tmp_path / "data", changed), other, config)
    assert Counted.calls > 0


def test_a_template_that_shows_the_day_is_kept_for_the_day(
    tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    before = tokenizer.identity()
    tokenizer._hf.chat_template += "{{ strftime_now('%d %b %Y') }}"
    day = tokenizer.identity()

    class Tomorrow:
        today = staticmethod(lambda: "tomorrow")

    monkeypatch.setattr("hybridflow.data.tokenizer.date", Tomorrow)
    assert len({before, day, tokenizer.identity()}) == 3


@pytest.mark.slow
def test_a_damaged_entry_is_made_again(tmp_path: Path, counted: Tokenizer, cache: Path) -> None:
    files = write(tmp_path / "data", rows_of(30))
    first = contents(PromptDataset(files, counted, CONFIG))
    [entry] = cache.iterdir()
    whole = entry.read_bytes()
    for damage in (whole[:100], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], b""):
        entry.write_bytes(damage)
        Counted.calls = 0
        assert contents(PromptDataset(files, counted, CONFIG)) == first
        assert Counted.calls > 0
        assert entry.read_bytes() == whole


def test_a_cache_of_others_or_without_room_is_not_used(
    tmp_path: Path, counted: Tokenizer, cache: Path, caplog: Any
) -> None:
    files = write(tmp_path / "data", rows_of(30))
    cache.parent.mkdir(parents=True)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    cache.symlink_to(theirs)
    assert len(PromptDataset(files, counted, CONFIG)) == 30
    assert not list(theirs.iterdir()) and "tokens are not cached" in caplog.text
    cache.unlink()
    cache.mkdir(mode=0o777)
    assert len(PromptDataset(files, counted, CONFIG)) == 30
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_entries_that_were_not_used_for_longest_make_room(
    tmp_path: Path, tokenizer: Tokenizer, cache: Path, monkeypatch: Any
) -> None:
    made = []
    for number in range(3):
        files = write(tmp_path / "data", rows_of(30 + number))
        PromptDataset(files, tokenizer, CONFIG)
        [entry] = {*cache.iterdir()} - {*made}
        made.append(entry)
        os.utime(entry, (number, number))
    (cache / ".left.tmp").write_bytes(b"x")
    os.utime(cache / ".left.tmp", (1, 1))
    PromptDataset(write(tmp_path / "data", rows_of(30)), tokenizer, CONFIG)  # uses the first
    monkeypatch.setattr(token_cache, "_MOST_BYTES", 3 * made[0].stat().st_size + 200)
    PromptDataset(write(tmp_path / "data", rows_of(40)), tokenizer, CONFIG)
    assert made[0].exists() and not made[1].exists() and made[2].exists()
    assert len(list(cache.iterdir())) == 3
