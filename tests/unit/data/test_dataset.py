import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config.schema_data import DataConfig, DatasetClassConfig, SftConfig
from hybridflow.data.custom import open_prompts, open_sampler, open_training
from hybridflow.data.dataset import PreferenceDataset, PromptDataset, SftDataset
from hybridflow.data.files import read_rows
from hybridflow.data.prepare.tasks.arithmetic import CHARACTERS
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError, DataError
from tests.unit.data.chat_tokenizers import TEMPLATES, tokenizer_with

ROLES = "a non-empty list of chat messages"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder, CHARACTERS)
    return load_tokenizer(folder)


def _row(content: str, truth: Any = "1", **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": len(content)},
    }
    return {**row, **changes}


def _file(folder: Path, rows: list[dict[str, Any]], name: str = "rows.parquet") -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return folder / name


def test_batches_hold_the_asked_rows_in_the_asked_order(tmp_path, tokenizer):
    one = _file(tmp_path, [_row("1+1", "2"), _row("10+20", "30")], "one.parquet")
    two = _file(tmp_path, [_row("7", ["7", "07"])], "two.parquet")
    dataset = PromptDataset([one, two], tokenizer, DataConfig())
    assert (len(dataset), dataset.data_sources) == (3, ["arithmetic"])
    batch = dataset.batch([2, 0, 1, 0])
    assert [tokenizer.decode(row) for row in batch["prompt_ids"]] == [
        "7=",
        "1+1=",
        "10+20=",
        "1+1=",
    ]
    assert batch["prompt_ids"].dtype == np.int64
    assert batch["index"].tolist() == [2, 0, 1, 0]
    assert batch["ground_truth"].tolist() == [["7", "07"], "2", "30", "2"]
    assert batch["extra_info"].tolist() == [{"index": 1}, {"index": 3}, {"index": 5}, {"index": 3}]
    assert batch["data_source"].tolist() == ["arithmetic"] * 4


@pytest.mark.parametrize("index", [[0, 3], [-1]])
def test_rows_outside_the_dataset_are_refused(tmp_path, tokenizer, index):
    dataset = PromptDataset([_file(tmp_path, [_row("1")] * 3)], tokenizer, DataConfig())
    with pytest.raises(
        IndexError, match=f"row {index[-1]} is out of range for a dataset of 3 rows"
    ):
        dataset.batch(index)


def test_extra_info_is_optional(tmp_path, tokenizer):
    row = _row("1")
    del row["extra_info"]
    assert PromptDataset([_file(tmp_path, [row])], tokenizer, DataConfig()).batch([0])[
        "extra_info"
    ].tolist() == [{}]


def test_message_fields_that_parquet_filled_with_null_do_not_reach_the_template(tmp_path):
    write_character_tokenizer(tmp_path / "t", CHARACTERS)
    (tmp_path / "t" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '+' if m.name is defined else '-' }}{% endfor %}"
    )
    row = _row(
        "1",
        prompt=[
            {"role": "user", "content": "1", "name": None},
            {"role": "user", "content": "2", "name": "x"},
        ],
    )
    tokenizer = load_tokenizer(tmp_path / "t")
    dataset = PromptDataset([_file(tmp_path, [row])], tokenizer, DataConfig())
    assert tokenizer.decode(dataset.batch([0])["prompt_ids"].row(0)) == "-+"


def test_another_prompt_key(tmp_path, tokenizer):
    path = _file(tmp_path, [_row("1", question=[{"role": "user", "content": "2"}])])
    dataset = PromptDataset([path], tokenizer, DataConfig(prompt_key="question"))
    assert tokenizer.decode(dataset.batch([0])["prompt_ids"].row(0)) == "2="


def test_prompts_are_kept_as_messages_where_the_settings_say(tmp_path, tokenizer):
    system = {"role": "system", "content": "1"}
    messages = [system, {"role": "user", "content": "2"}]
    path = _file(tmp_path, [_row("1", prompt=messages)])
    (kept,) = PromptDataset([path], tokenizer, DataConfig(keep_prompts=True)).batch([0])["prompt"]
    assert kept == messages
    assert "prompt" not in PromptDataset([path], tokenizer, DataConfig()).batch([0])
    texts = _file(tmp_path, [_row("1", prompt="34")])
    (kept,) = PromptDataset([texts], tokenizer, DataConfig(keep_prompts=True)).batch([0])["prompt"]
    assert kept == [{"role": "user", "content": "34"}]


# --- prompts that are too long: "12345678" is 9 tokens with "="


@pytest.mark.parametrize(
    ("truncation", "text"), [("left", "5678="), ("right", "12345"), ("middle", "1278=")]
)
def test_truncation_cuts_where_it_says(tmp_path, tokenizer, truncation, text):
    path = _file(tmp_path, [_row("12345678"), _row("1234")])
    dataset = PromptDataset(
        [path], tokenizer, DataConfig(max_prompt_length=5, truncation=truncation)
    )
    assert [tokenizer.decode(row) for row in dataset.batch([0, 1])["prompt_ids"]] == [text, "1234="]
    assert (dataset.num_truncated, dataset.num_filtered) == (1, 0)


def test_a_prompt_that_is_too_long_is_refused_with_row_length_limit_and_ways_out(
    tmp_path, tokenizer
):
    path = _file(tmp_path, [_row("1234"), _row("12345678")])
    named = (
        r"rows\.parquet, row 1: the prompt has 9 tokens, but data\.max_prompt_length is "
        r"5.*filter_overlong_prompts.*data\.truncation"
    )
    with pytest.raises(DataError, match=named):
        PromptDataset([path], tokenizer, DataConfig(max_prompt_length=5))


def test_filtering_drops_long_prompts_and_numbers_the_rest_without_gaps(tmp_path, tokenizer):
    path = _file(tmp_path, [_row("12345678"), _row("1"), _row("12345678"), _row("2"), _row("3")])
    config = DataConfig(max_prompt_length=5, filter_overlong_prompts=True)
    dataset = PromptDataset([path], tokenizer, config, max_rows=2)
    assert (len(dataset), dataset.num_filtered) == (2, 2)
    assert [tokenizer.decode(row) for row in dataset.batch([0, 1])["prompt_ids"]] == ["1=", "2="]
    assert dataset.batch([0, 1])["index"].tolist() == [0, 1]


def test_nothing_left_after_filtering_is_an_error(tmp_path, tokenizer):
    path = _file(tmp_path, [_row("12345678")])
    with pytest.raises(DataError, match=r"no rows left \(1 dropped"):
        PromptDataset(
            [path], tokenizer, DataConfig(max_prompt_length=5, filter_overlong_prompts=True)
        )


# --- files that are not what they should be


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt": 12}, f"row 1, column 'prompt': expected {ROLES}"),
        ({"prompt": []}, f"row 1, column 'prompt': expected {ROLES}"),
        ({"prompt": None}, f"row 1, column 'prompt': expected {ROLES}"),
        (
            {"prompt": [{"role": "user", "content": None}]},
            f"row 1, column 'prompt': expected {ROLES}",
        ),
        ({"prompt": [{"role": "user"}]}, f"row 1, column 'prompt': expected {ROLES}"),
        ({"data_source": None}, "row 1, column 'data_source': expected a string, found None"),
        (
            {"reward_model": {"style": "rule", "ground_truth": None}},
            "row 1, column 'reward_model': expected a struct",
        ),
        ({"reward_model": None}, "row 1, column 'reward_model': expected a struct"),
    ],
)
def test_a_malformed_value_is_named_with_file_row_and_column(tmp_path, tokenizer, changes, named):
    rows = [_row("1"), _row("1", **changes)]
    if not isinstance(changes.get("prompt"), list | None):
        rows[0] = {**rows[0], **changes}
        named = named.replace("row 1", "row 0")
    with pytest.raises(DataError, match=rf"rows\.parquet, {named}"):
        PromptDataset([_file(tmp_path, rows)], tokenizer, DataConfig())


@pytest.mark.slow
def test_the_row_number_is_right_beyond_one_read_batch(tmp_path, tokenizer):
    rows = [_row("1")] * 5000 + [_row("1", data_source=None)]
    with pytest.raises(DataError, match="row 5000, column 'data_source'"):
        PromptDataset([_file(tmp_path, rows)], tokenizer, DataConfig())


@pytest.mark.slow
def test_a_missing_column_is_named_with_those_there_are(tmp_path, tokenizer):
    path = _file(tmp_path, [{"question": "x", "data_source": "y"}])
    with pytest.raises(
        DataError,
        match=(
            r"rows\.parquet: column 'prompt', 'reward_model' is missing; the file has question, "
            r"data_source"
        ),
    ):
        PromptDataset([path], tokenizer, DataConfig())


def test_a_refusing_chat_template_is_named_with_its_row(tmp_path, tokenizer):
    write_character_tokenizer(tmp_path / "strict", CHARACTERS)
    (tmp_path / "strict" / "chat_template.jinja").write_text(
        "{{ raise_exception('no such role') }}"
    )
    with pytest.raises(DataError, match=r"rows\.parquet, row 0, column 'prompt': .*no such role"):
        PromptDataset(
            [_file(tmp_path, [_row("1")])], load_tokenizer(tmp_path / "strict"), DataConfig()
        )


def test_missing_and_unreadable_files_are_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"nowhere\.parquet: no such file"):
        PromptDataset([tmp_path / "nowhere.parquet"], tokenizer, DataConfig())
    with pytest.raises(DataError, match="no dataset files"):
        PromptDataset([], tokenizer, DataConfig())
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(DataError, match=r"text\.parquet: not a readable parquet file"):
        PromptDataset([tmp_path / "text.parquet"], tokenizer, DataConfig())


def test_damage_at_the_end_and_in_the_middle_of_a_file_is_reported(tmp_path, tokenizer):
    path = _file(tmp_path, [_row(str(i), str(i)) for i in range(3000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not a readable parquet file"):
        PromptDataset([path], tokenizer, DataConfig())
    path.write_bytes(whole[:4] + b"\xff" * 2000 + whole[2004:])
    with pytest.raises(DataError, match="not a readable parquet file"):
        PromptDataset([path], tokenizer, DataConfig())


# --- demonstrations


def _demonstration(content: str, response: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "response": response}


def test_demonstrations_are_split_into_prompt_and_response_with_eos(tmp_path, tokenizer):
    dataset = SftDataset(
        [_file(tmp_path, [_demonstration("1+1", "2"), _demonstration("9+9", "18")])],
        tokenizer,
        DataConfig(),
    )
    batch = dataset.batch([1, 0])
    assert len(dataset) == 2
    assert batch["index"].tolist() == [1, 0]
    assert [row.tolist() for row in batch["prompt_ids"]] == [
        tokenizer.encode("9+9="),
        tokenizer.encode("1+1="),
    ]
    assert [row.tolist() for row in batch["response_ids"]] == [
        [*tokenizer.encode("18"), tokenizer.eos_id],
        [*tokenizer.encode("2"), tokenizer.eos_id],
    ]


def test_a_response_that_is_too_long_with_its_eos(tmp_path, tokenizer):
    path = _file(tmp_path, [_demonstration("1", "123"), _demonstration("1", "1234")])
    with pytest.raises(
        DataError,
        match=(
            r"row 1: the response with its end token has 5 tokens, but data\.max_response_length is 4"
        ),
    ):
        SftDataset([path], tokenizer, DataConfig(max_response_length=4))
    filtered = SftDataset(
        [path], tokenizer, DataConfig(max_response_length=4, filter_overlong_prompts=True)
    )
    assert (len(filtered), filtered.num_filtered) == (1, 1)
    cut = SftDataset([path], tokenizer, DataConfig(max_response_length=4, truncation="left"))
    assert [row.tolist()[-1] for row in cut.batch([0, 1])["response_ids"]] == [
        tokenizer.eos_id,
        tokenizer.encode("4")[0],
    ]


@pytest.mark.parametrize("response", ["3", "3<eos>", "3<eos>\n", "3<eos><eos>"])
def test_a_response_ends_once(tmp_path, tokenizer, response):
    prompt = [{"role": "user", "content": "1+2"}]
    path = _file(tmp_path, [{"prompt": prompt, "response": response}])
    batch = SftDataset([path], tokenizer, DataConfig()).batch([0])
    assert batch.jagged("response_ids").row(0).tolist() == tokenizer.encode("3<eos>")
    pair = _file(
        tmp_path, [{"prompt": prompt, "chosen": response, "rejected": "4<eos>"}], "pairs.parquet"
    )
    batch = PreferenceDataset([pair], tokenizer, DataConfig()).batch([0])
    assert batch.jagged("chosen_ids").row(0).tolist() == tokenizer.encode("3<eos>")


def test_a_response_ends_as_the_template_ends_it(tmp_path):
    chatml = tokenizer_with(TEMPLATES["Qwen-Qwen3-0.6B"], "<|endoftext|>")
    path = _file(tmp_path, [{"prompt": [{"role": "user", "content": "1+2"}], "response": "3"}])
    batch = SftDataset([path], chatml, DataConfig()).batch([0])
    assert batch.jagged("response_ids").row(0).tolist() == chatml.encode("3<|im_end|>")


@pytest.mark.parametrize("response", ["", "<eos>", "<eos><eos>\n"])
def test_an_empty_response_is_refused_with_its_row(tmp_path, tokenizer, response):
    prompt = [{"role": "user", "content": "1+2"}]
    rows = [{"prompt": prompt, "response": "3"}, {"prompt": prompt, "response": response}]
    with pytest.raises(
        DataError, match=r"rows\.parquet, row 1, column 'response': expected a non-empty answer"
    ):
        SftDataset([_file(tmp_path, rows)], tokenizer, DataConfig())


def test_a_prompt_that_ends_with_the_assistant_is_refused_or_continued(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    path = _file(tmp_path, [_row("7"), _row("", prompt=messages)])
    with pytest.raises(
        DataError, match=r"row 1, column 'prompt': the last message is from the assistant \('3'\)"
    ):
        PromptDataset([path], tokenizer, DataConfig())
    dataset = PromptDataset([path], tokenizer, DataConfig(continue_final_message=True))
    assert [tokenizer.decode(row) for row in dataset.batch([0, 1])["prompt_ids"]] == ["7=", "1+2=3"]


def test_a_demonstration_without_response_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match="column 'answer' is missing"):
        SftDataset(
            [_file(tmp_path, [_demonstration("1", "2")])],
            tokenizer,
            DataConfig(),
            SftConfig(response_key="answer"),
        )
    with pytest.raises(DataError, match="row 1, column 'response': expected a string"):
        SftDataset(
            [_file(tmp_path, [_demonstration("1", "2"), _demonstration("1", None)])],
            tokenizer,
            DataConfig(),
        )


CUSTOM = """
from hybridflow.data.dataset import PromptDataset

class Reversed(PromptDataset):
    def batch(self, indices):
        return super().batch(len(self) - 1 - indices)

class Bare:
    def __init__(self, files, tokenizer, config, *, max_rows=None): ...
    def __len__(self): return 1

class NoIndex(PromptDataset):
    def batch(self, indices):
        return super().batch(indices).drop(["index"])
"""


def _custom(folder: Path, tokenizer: Tokenizer, name: str, rows: int = 3) -> Any:
    (folder / "mine.py").write_text(CUSTOM)
    files = [_file(folder, [_row(str(i)) for i in range(rows)])]
    return open_prompts(
        files,
        tokenizer,
        DataConfig(dataset_class=DatasetClassConfig(str(folder / "mine.py"), name)),
    )


def test_a_dataset_class_of_ones_own_is_used(tmp_path, tokenizer):
    dataset = _custom(tmp_path, tokenizer, "Reversed")
    assert dataset.batch(np.array([0, 2]))["index"].tolist() == [2, 0]
    assert isinstance(
        open_prompts([_file(tmp_path, [_row("1")])], tokenizer, DataConfig()), PromptDataset
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Missing", "'Missing' is not a class .it has: Bare, NoIndex, Reversed"),
        ("Bare", "lacks batch, data_sources"),
        ("NoIndex", "lacks column 'index'"),
    ],
)
def test_a_dataset_class_that_cannot_serve_is_refused_with_a_reason(
    tmp_path, tokenizer, name, said
):
    with pytest.raises(ConfigError, match=said):
        _custom(tmp_path, tokenizer, name)


def test_a_dataset_file_that_is_missing_or_broken_is_named(tmp_path, tokenizer):
    for text, said in ((None, "not found"), ("1/0", "could not be imported: ZeroDivisionError")):
        path = tmp_path / "broken.py"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            open_prompts([], tokenizer, DataConfig(dataset_class=DatasetClassConfig(str(path))))


def test_weights_and_curriculum_come_from_extra_info(tmp_path, tokenizer):
    rows = [
        _row(str(i), extra_info={"index": i, "level": 3 - i, "weight": float(i > 1)})
        for i in range(4)
    ]
    dataset = PromptDataset([_file(tmp_path, rows)], tokenizer, DataConfig())
    easy_first = open_sampler(
        DataConfig(train_batch_size=4, difficulty_key="level"), dataset, seed=1
    )
    assert next(easy_first).tolist() == [3, 2, 1, 0]
    weighted = open_sampler(DataConfig(train_batch_size=4, weight_key="weight"), dataset, seed=1)
    assert sorted(next(weighted).tolist()) == [2, 2, 3, 3]
    with pytest.raises(ConfigError, match=r"row 0: extra_info\['nothing'\] must be a number"):
        open_sampler(DataConfig(weight_key="nothing"), dataset, seed=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n', "it starts with .*JSON lines; convert it"),
        (b"prompt,answer\n1,2\n", "another format"),
        (b"PAR1 and then nothing", "footer|magic|file size"),
        (b"", "file size"),
    ],
)
def test_a_file_of_another_kind_is_not_called_truncated(tmp_path, content, said):
    (tmp_path / "rows.parquet").write_bytes(content)
    with pytest.raises(DataError, match=rf"rows\.parquet: not a readable parquet file: .*{said}"):
        list(read_rows(tmp_path / "rows.parquet", ["prompt"]))


def test_a_batch_larger_than_the_data_is_refused(tmp_path, tokenizer):
    files = (str(_file(tmp_path, [_row("1+1")] * 4, "a.parquet")),)
    config = DataConfig(train_files=files, train_batch_size=5)
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size=5 exceeds the 4 rows of .*a\.parquet"
    ):
        open_training(tokenizer, config)
    assert len(open_training(tokenizer, DataConfig(train_files=files, train_batch_size=4))) == 4


LINES = [
    {"question": "1+1", "answer": {"final": "2"}},
    {"question": "2+3", "answer": {"final": "5"}},
]
MAPPED = DataConfig(
    prompt_key="question", ground_truth_key="answer.final", data_source="arithmetic"
)


def _write(folder: Path, form: str) -> Path:
    path = folder / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(LINES), path)
    elif form == "arrow":
        table = pa.Table.from_pylist(LINES)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif form == "csv":
        path.write_text("question,answer\n1+1,2\n2+3,5\n")
    else:
        path.write_text(json.dumps(LINES) if form == "json" else "\n".join(map(json.dumps, LINES)))
    return path


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json", "arrow", "csv"])
def test_files_of_other_forms_and_columns_are_mapped_by_keys(tmp_path, tokenizer, form):
    config = replace(MAPPED, ground_truth_key="answer") if form == "csv" else MAPPED
    batch = PromptDataset([_write(tmp_path, form)], tokenizer, config).batch([0, 1])
    assert [tokenizer.decode(row) for row in batch["prompt_ids"]] == ["1+1=", "2+3="]
    assert batch["ground_truth"].tolist() == ["2", "5"] and set(batch["data_source"]) == {
        "arithmetic"
    }


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("parquet", {"prompt_key": "prompt"}, "column 'prompt' is missing; .*data.prompt_key"),
        (
            "jsonl",
            {"data_source": None},
            "column 'data_source' is missing; .*data.data_source=NAME",
        ),
        (
            "json",
            {"ground_truth_key": "answer.last"},
            "row 0, column 'answer': expected a struct with last",
        ),
    ],
)
def test_columns_that_are_not_there_are_named_with_the_keys(
    tmp_path, tokenizer, form, change, message
):
    with pytest.raises(DataError, match=message):
        PromptDataset([_write(tmp_path, form)], tokenizer, replace(MAPPED, **change))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"question": "1", "answer": {"final": "1"}}\n[1]\n',
            "line 2: expected an object",
        ),
        ("a.jsonl", b"\xff\n", "line 1: not valid JSON"),
        ("a.json", b"[1, 2", "not valid JSON"),
        ("a.csv", b"question,answer\n1\n", "different number of values than the header"),
        ("a.arrow", b"nothing", "not a readable Arrow file"),
    ],
)
def test_damaged_files_are_named(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        PromptDataset([tmp_path / name], tokenizer, MAPPED)
