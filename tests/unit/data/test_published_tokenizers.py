"""Tokenizers as published: what ids mean, where an answer ends, which files can be read, and which
would not return."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from hybridflow.data import chat_trial
from hybridflow.data.prepare.tasks.arithmetic import CHARACTERS
from hybridflow.data.prepare.tokenizer_files import write_byte_tokenizer, write_character_tokenizer
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import DataError
from tests.published.folders import FAMILIES, code_ran, published_folder
from tests.published.texts import mixed_texts
from tests.published.tokenizers import CHATML_TEMPLATE, FORMS, write_tokenizer

Edit = Callable[[dict[str, Any]], None]


def edit(file: Path, change: Edit) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def byte_folder(folder: Path, change: Edit) -> Path:
    write_byte_tokenizer(folder)
    edit(folder / "tokenizer.json", change)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_folder_is_read_and_its_code_is_not_run(family: str, tmp_path: Path) -> None:
    folder = published_folder(family, tmp_path)
    found = load_tokenizer(folder)
    specials = write_tokenizer(family, tmp_path / "again")
    assert set(found.stop_ids) == {
        specials[token] for token in (*FORMS[family].stops, FORMS[family].eos)
    }
    assert found.encode(FORMS[family].stops[0]) == [specials[FORMS[family].stops[0]]]
    assert found.vocab_size <= FORMS[family].rows
    assert found.render_chat([{"role": "user", "content": "1 + 1?"}]).count("1 + 1?") == 1
    if (folder / "tokenizer.json").exists():
        file = RustTokenizer.from_file(str(folder / "tokenizer.json"))
        for text in mixed_texts(100, seed=7):
            assert found.encode(text) == file.encode(text, add_special_tokens=False).ids
    assert not code_ran(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5", "mixtral", "qwen3"])
def test_a_tokenizer_without_a_model_beside_it_is_what_its_file_says(
    family: str, tmp_path: Path
) -> None:
    write_tokenizer(family, tmp_path)
    found = load_tokenizer(tmp_path)
    file = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in mixed_texts(50, seed=8):
        assert found.encode(text) == file.encode(text, add_special_tokens=False).ids


def test_an_id_beyond_the_number_of_tokens_has_its_token(tmp_path: Path) -> None:
    def move(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["Q"] = 700

    found = load_tokenizer(byte_folder(tmp_path, move))
    assert found.encode("Q") == [700] and found.decode([700]) == "Q" and found.vocab_size == 701
    number = found.encode("R")[0] - 1  # where Q was
    assert found.decode([*found.encode("P"), number, 699]) == "P\ufffd\ufffd"


def test_a_pad_token_that_is_an_ordinary_token_is_read_as_one(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path, CHARACTERS)
    edit(tmp_path / "tokenizer_config.json", lambda config: config.update(pad_token="0"))
    found = load_tokenizer(tmp_path)
    zero = found.pad_id
    eos = found.eos_id
    assert found.encode("0") == [zero]
    assert (
        found.decode(found.encode("100")) == "100"
        and found.decode([*found.encode("10"), eos, zero, zero]) == "10"
    )
    assert found.decode([zero, eos]) == "0" and found.decode([zero]) == "0"
    assert found.decode_response([*found.encode("100"), eos, zero]) == "100"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_all_ends_that_a_config_lists_stop(name: str, tmp_path: Path) -> None:
    folder = write_character_folder(tmp_path)
    (folder / name).write_text(json.dumps({"model_type": "qwen3", "eos_token_id": [5, 1]}))
    assert load_tokenizer(folder).stop_ids == (1, 5)
    for wrong in ("two", [1, None], 1.5, True, {"id": 1}):
        (folder / name).write_text(json.dumps({"model_type": "qwen3", "eos_token_id": wrong}))
        with pytest.raises(DataError, match=rf"{name}: eos_token_id"):
            load_tokenizer(folder)


def write_character_folder(folder: Path) -> Path:
    write_character_tokenizer(folder, CHARACTERS)
    return folder


def test_the_token_behind_an_assistants_text_stops(tmp_path: Path) -> None:
    """A base model's eos with a chat template that ends turns otherwise."""
    specials = write_tokenizer("qwen2.5", tmp_path)
    edit(
        tmp_path / "tokenizer_config.json", lambda config: config.update(eos_token="<|endoftext|>")
    )
    found = load_tokenizer(tmp_path)
    assert found.eos_id == specials["<|endoftext|>"]
    assert found.stop_ids == (specials["<|endoftext|>"], specials["<|im_end|>"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",  # a newline is no token of its own
        "{{ raise_exception('one turn') }}",
        # leaves answers out
        "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
        None,
    ],
)
def test_templates_that_end_no_turn_add_no_stop(template: str | None, tmp_path: Path) -> None:
    specials = write_tokenizer("qwen2.5", tmp_path)
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    edit(tmp_path / "tokenizer_config.json", lambda config: config.update(settings))
    assert load_tokenizer(tmp_path).stop_ids == (specials["<|endoftext|>"],)


@pytest.mark.slow
def test_a_normalizer_that_doubles_its_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(content: dict[str, Any]) -> None:
        one = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        content["normalizer"] = {"type": "Sequence", "normalizers": [one] * 32}

    monkeypatch.setattr(chat_trial, "SECONDS", 1)
    with pytest.raises(
        DataError, match=r"tokenizer\.json is unusable: .* more than (1 GiB of memory|1 s)"
    ):
        load_tokenizer(byte_folder(tmp_path, double))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["(a+)+$", "([b-d]+)+$", "(7*)*$", "( +)+$"])
def test_a_pattern_that_backtracks_without_end_is_refused(pattern: str, tmp_path: Path) -> None:
    def split(content: dict[str, Any]) -> None:
        part = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [part, content["pre_tokenizer"]],
        }

    with pytest.raises(DataError, match=r"tokenizer\.json is unusable: "):
        load_tokenizer(byte_folder(tmp_path, split))


def test_a_failure_inside_the_tokenizer_is_one_message(tmp_path: Path) -> None:
    """A pattern that the trial's texts do not reach ends in a panic of the library, which is no
    Exception."""

    def split(content: dict[str, Any]) -> None:
        part = {
            "type": "Split",
            "pattern": {"Regex": "Ω(?:(?:ab|a|b)+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [part, content["pre_tokenizer"]],
        }

    found = load_tokenizer(byte_folder(tmp_path, split))
    assert found.encode("aab") and found.encode("Ω")
    with pytest.raises(DataError, match=r"the tokenizer failed on a text of 61 characters"):
        found.encode("Ω" + "ab" * 29 + "a!")


@pytest.mark.slow
def test_the_trial_leaves_the_process_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def split(content: dict[str, Any]) -> None:
        content["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }

    folder = byte_folder(tmp_path, split)
    with pytest.raises(DataError):
        load_tokenizer(folder)
    assert capfd.readouterr().err == ""
    assert chat_trial.trial([lambda: None]) == ""
    shutil.rmtree(folder)
    write_byte_tokenizer(folder)
    assert load_tokenizer(folder).encode("a" * 60)


def test_the_default_template_of_several_is_taken(tmp_path: Path) -> None:
    specials = write_tokenizer("qwen2.5", tmp_path)
    templates = [
        {"name": "default", "template": CHATML_TEMPLATE},
        {"name": "tool_use", "template": "x"},
    ]
    edit(tmp_path / "tokenizer_config.json", lambda config: config.update(chat_template=templates))
    found = load_tokenizer(tmp_path)
    assert found.stop_ids == (specials["<|im_end|>"],)
    assert "1?" in found.render_chat([{"role": "user", "content": "1?"}])


def test_a_trial_keeps_to_the_limits_that_its_process_has() -> None:
    """A limit that the child cannot set must not let it go on as a second process of its caller."""
    source = (
        "import resource; from hybridflow.data.chat_trial import BYTES, trial\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + BYTES // 4\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (4, 4))\n"
        "print(trial([lambda: None]) or 'fine')"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")
