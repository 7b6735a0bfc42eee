import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.prepare.tasks.arithmetic import CHARACTERS
from hybridflow.data.prepare.tokenizer_files import (
    END,
    PAD,
    ROLES,
    write_byte_tokenizer,
    write_character_tokenizer,
)
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import DataError

SPECIALS = (PAD, END, *ROLES)


@pytest.fixture(scope="module")
def character_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(folder, CHARACTERS)
    return folder


@pytest.fixture(scope="module")
def characters(character_folder) -> Tokenizer:
    return load_tokenizer(character_folder)


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text_bytes(byte_folder) -> Tokenizer:
    return load_tokenizer(byte_folder)


def test_characters_have_one_token_each_and_the_prompt_ends_with_equals(characters):
    ids = characters.encode_chat([{"role": "user", "content": "12+34"}])
    assert characters.render_chat([{"role": "user", "content": "12+34"}]) == "12+34="
    assert ids == characters.encode("12+34=") == [3 + CHARACTERS.index(c) for c in "12+34="]
    assert (characters.pad_id, characters.eos_id, characters.stop_ids, characters.vocab_size) == (
        0,
        1,
        (1,),
        3 + len(CHARACTERS),
    )


@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_characters_survive_the_round_trip(characters, text):
    assert characters.decode(characters.encode(text)) == text
    assert len(characters.encode(text)) == len(text)


@given(
    st.text(st.characters(codec="utf-8"), max_size=40).filter(
        lambda text: not any(special in text for special in SPECIALS)
    )
)
def test_any_text_survives_the_byte_tokenizer(text_bytes, text):
    ids = text_bytes.encode(text)
    assert len(ids) == len(text.encode())
    assert text_bytes.decode(ids) == text


@pytest.mark.parametrize("special", SPECIALS)
def test_a_special_token_written_out_in_text_is_that_token(text_bytes, special):
    (token,) = text_bytes.encode(special)
    assert text_bytes.encode(f"a{special}b") == [
        *text_bytes.encode("a"),
        token,
        *text_bytes.encode("b"),
    ]


def test_roles_and_turn_ends_are_single_tokens(text_bytes):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    assert (
        text_bytes.render_chat(messages)
        == "<|system|>Be brief.<|end|><|user|>1 + 1?<|end|><|assistant|>"
    )
    assert len(text_bytes.encode_chat(messages)) == len("Be brief.") + len("1 + 1?") + 5
    assert text_bytes.vocab_size == 256 + 5
    assert text_bytes.decode([text_bytes.eos_id]) == "" and text_bytes.encode("<|end|>") == [
        text_bytes.eos_id
    ]


def test_decoding_leaves_stop_and_pad_tokens_at_the_end_out_and_shows_all_others(characters):
    four, six = characters.encode("46")
    eos = characters.eos_id
    pad = characters.pad_id
    assert characters.decode([four, six, eos, pad, pad]) == "46"
    assert characters.decode([four, eos, six]) == "4<eos>6"
    assert characters.decode([four, pad, six]) == "4<pad>6"
    assert characters.decode([four, 2, six]) == "4<unk>6"


def test_ids_without_a_token_stay_visible(characters):
    four, six = characters.encode("46")
    assert characters.decode([four, characters.vocab_size, six]) == "4\ufffd6"
    assert characters.decode([four, six, 10_000]) == "46\ufffd"
    assert characters.decode([-1]) == "\ufffd"


def test_a_response_ends_at_its_first_stop_token(characters):
    four, six = characters.encode("46")
    assert characters.decode_response([four, characters.eos_id, six]) == "4"
    assert characters.decode_response([four, six]) == "46"
    assert characters.decode_response([]) == ""


def test_more_stop_tokens_come_from_the_generation_config(character_folder, tmp_path):
    folder = shutil.copytree(character_folder, tmp_path / "tokenizer")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    assert load_tokenizer(folder).stop_ids == (1, 5)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json"):
        load_tokenizer(folder)


def test_a_model_config_next_to_the_tokenizer_does_not_change_it(character_folder, tmp_path):
    folder = shutil.copytree(character_folder, tmp_path / "export")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32})
    )
    assert load_tokenizer(folder).encode("12+34=") == load_tokenizer(character_folder).encode(
        "12+34="
    )


def test_what_cannot_be_read_is_named(character_folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*does not exist.*nothing is downloaded"):
        load_tokenizer(tmp_path / "nowhere")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 32}))
    with pytest.raises(DataError, match=r"model has no tokenizer files.*model\.tokenizer"):
        load_tokenizer(model)
    folder = shutil.copytree(character_folder, tmp_path / "broken")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken.*no readable Hugging Face tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_without_eos_or_template_is_named(character_folder, tmp_path):
    folder = shutil.copytree(character_folder, tmp_path / "tokenizer")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(folder).encode_chat([{"role": "user", "content": "1"}])
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only one turn') }}")
    with pytest.raises(DataError, match="only one turn"):
        load_tokenizer(folder).encode_chat([{"role": "user", "content": "1"}])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="no eos_token"):
        load_tokenizer(folder)


def test_loading_changes_no_setting_of_the_process_and_opens_no_connection(
    character_folder, monkeypatch
):
    def refuse(*args):
        raise AssertionError(f"a connection to {args[-1]}")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = dict(os.environ)
    assert load_tokenizer(character_folder).vocab_size == 3 + len(CHARACTERS)
    assert dict(os.environ) == before


def test_a_chat_template_is_given_its_arguments_and_unread_ones_are_refused(byte_folder, tmp_path):
    shutil.copytree(byte_folder, tmp_path / "thinking")
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}think{% endif %}"
    )
    (tmp_path / "thinking" / "chat_template.jinja").write_text(template)
    plain = load_tokenizer(tmp_path / "thinking")
    thinking = plain.with_template({"enable_thinking": True})
    messages = [{"role": "user", "content": "12"}]
    assert (plain.render_chat(messages), thinking.render_chat(messages)) == ("12", "12think")
    assert thinking.with_template({"enable_thinking": False}).render_chat(messages) == "12"
    with pytest.raises(
        DataError, match=r"chat_template_kwargs\.thinking is not used by the chat template of "
    ):
        plain.with_template({"thinking": True})
