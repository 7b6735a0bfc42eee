"""Files of somebody else: each is refused with one message of ours, nothing of it runs, and memory
stays bounded."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import read_parquet
from hybridflow.config import derived
from hybridflow.config.model_config import wrong_fields
from hybridflow.config.outside_json import read_outside_json
from hybridflow.config.schema import ModelConfig
from hybridflow.data import chat_trial
from hybridflow.data.prepare.tokenizer_files import write_byte_tokenizer
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import CheckpointError, ConfigError, DataError, ModelError
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.saving.manifest import read_index, read_sealed

DEEP = "[" * 200_000


@pytest.fixture(autouse=True)
def _bounded_memory() -> object:
    """Half a gigabyte more than before, at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10


# ---- JSON


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text(DEEP), "nested too deeply"),
        (lambda path: path.write_text('{"a":' * 100_000), "nested too deeply"),
        (lambda path: path.write_text("[]"), "expected a JSON object, got list"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "not UTF-8|not JSON"),
        (lambda path: path.write_text('{"a": ' + "9" * 100_000 + "}"), "not JSON|digits"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
    ],
)
def test_hostile_json(tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    file = tmp_path / "config.json"
    write(file)
    with pytest.raises(ValueError, match=message):
        read_outside_json(file)
    with pytest.raises(ConfigError, match=r"model\.path=.*config\.json is"):
        derived.hf_config(ModelConfig(path=str(tmp_path)))


def test_json_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than 67108864 bytes"):
        read_outside_json(file)


def test_a_link_in_a_circle_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="could not be read"):
        derived.hf_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_experts"])
@pytest.mark.parametrize("size", [1 << 40, -1])
def test_absurd_sizes_of_a_model(key: str, size: int) -> None:
    (found,) = wrong_fields({"num_hidden_layers": 2, key: size})
    assert f"{key}={size}: expected a whole number from 1 to " in found


# ---- a model's folder


def model_folder(tmp_path: Path, header: bytes, body: bytes = b"") -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + body)
    return tmp_path


def tensor(shape: list[int], begin: int, end: int) -> bytes:
    return json.dumps(
        {"w": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}}
    ).encode()


@pytest.mark.parametrize(
    "header",
    [
        tensor([1 << 40, 1 << 40], 0, 4),
        tensor([1 << 62], 0, 1 << 62),
        tensor([2], 0, 8),  # of which there is nothing
        tensor([1], 100, 104),
        b'{"w":' * 100_000,
        b"not json",
        b"",
    ],
)
def test_hostile_safetensors(tmp_path: Path, header: bytes) -> None:
    folder = model_folder(tmp_path, header)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a complete safetensors file"):
        SafetensorsFolder(folder)


def test_a_header_that_says_it_is_endless(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + b"{}")
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", "a/b.safetensors", 7]
)
def test_an_index_that_points_outside(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ModelError, match=r"is assigned to .* which is not a file in this folder"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", [DEEP, "[]", "{}", '{"weight_map": 3}'])
def test_a_hostile_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json (is|has)"):
        SafetensorsFolder(tmp_path)


# ---- tokenizers and chat templates


def tokenizer_folder(tmp_path: Path, **settings: object) -> Path:
    write_byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    for template in tmp_path.glob("*.jinja"):
        template.unlink()
    return tmp_path


def test_a_tokenizer_whose_code_comes_with_it_is_not_run(tmp_path: Path) -> None:
    folder = tokenizer_folder(
        tmp_path,
        auto_map={"AutoTokenizer": ["code.Evil", "code.Evil"]},
        tokenizer_class="Evil",
        chat_template="x",
    )
    (folder / "code.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\nclass Evil: pass\n")
    try:
        load_tokenizer(folder)
    except DataError as error:
        assert str(folder) in str(error)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("text", [DEEP, '{"version": "1.0", "model": ' + DEEP, "{}", "\x00" * 1000])
def test_a_hostile_tokenizer_file(tmp_path: Path, text: str) -> None:
    folder = tokenizer_folder(tmp_path)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="no readable Hugging Face tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_settings_of_a_tokenizer_without_an_end_are_not_read(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path)
    with (folder / name).open("ab") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(DataError, match=rf"{name} is larger than the limit of 8388608 bytes"):
        load_tokenizer(folder)


def test_a_pipe_among_a_tokenizers_files(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    os.mkfifo(folder / "added_tokens.json")
    with pytest.raises(DataError, match=r"added_tokens\.json is not a regular file"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("template", "seconds", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            1,
            "more than 1 s",
        ),
        # a busy machine may need seconds of processor time to find a gigabyte
        ("{{ 'a' * 4000000000 }}", 60, "more than 1 GiB of memory"),
        (
            (
                "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s "
                "%}{% endfor %}"
            ),
            60,
            "more than 1 GiB of memory",
        ),
        ("{{ 7 ** 999999999 }}", 1, "more than 1 s|GiB"),
        (
            (
                "{% for m in messages if m.role == 'tool' %}{% for i in range(99999) %}{% for j in "
                "range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
            ),
            1,
            "more than 1 s",
        ),
    ],
)
def test_a_template_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, seconds: int, message: str
) -> None:
    monkeypatch.setattr(chat_trial, "SECONDS", seconds)
    with pytest.raises(DataError, match=f"chat template is unusable: .*({message})"):
        load_tokenizer(tokenizer_folder(tmp_path, chat_template=template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        (
            "{{ self._TemplateReference__context.environment }}{{ "
            "cycler.__init__.__globals__.os.system('touch trap') }}"
        ),
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_does_not_get_out_of_its_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, chat_template=template))
    try:
        text = tokenizer.render_chat([{"role": "user", "content": "x"}])
    except DataError as error:
        text = ""
        assert "the chat template rejected" in str(error)
    assert not Path("trap").exists() and "root:" not in text and "<class" not in text


# ---- parquet


def test_a_parquet_file_that_would_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bomb.parquet"
    pq.write_table(
        pa.table({"x": ["a" * 1_000_000] * 20}), file, compression="zstd", use_dictionary=False
    )
    assert file.stat().st_size < 100_000
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)  # as if on a machine of 16 MiB
    with pytest.raises(
        DataError, match=r"bomb\.parquet: row group 0 decompresses to .* smaller row groups"
    ):
        read_parquet(file)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_no_parquet_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.parquet"
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](
        path
    )
    with pytest.raises(DataError, match="not a regular file"):
        read_parquet(path)


@settings(max_examples=60)
@given(st.data())
def test_any_damage_to_a_parquet_file_is_a_message(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("p") / "x.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3], "y": [[1], [2, 3], []]}), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read_parquet(path)
    except Exception as error:
        assert isinstance(error, DataError), error


# ---- checkpoints


@pytest.mark.parametrize("text", [DEEP, "[]", "3", "{}", "null", '{"chunks": 1}', "\x00"])
def test_a_hostile_checkpoint(tmp_path: Path, text: str) -> None:
    for name in ("index.json", "manifest.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        read_index(tmp_path)
    with pytest.raises(CheckpointError, match=r"manifest\.json (cannot be read|has no hash)"):
        read_sealed(tmp_path / "manifest.json")
