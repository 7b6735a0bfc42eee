"""Model folders of somebody else. `python -m tests.security.foreign_models WORK` reads lines [kind,
command...] and answers each with a line {command: [status, exit code, stdout, stderr]}: each
command runs in a fork that has 1 GiB, 5 s of the processor and a minute, with its modules
loaded."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.published.folders import published_folder
from tests.security.foreign import DEEP, STEER
from tests.security.read_foreign import BYTES, SECONDS, run

Make = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
NAMES += ("added_tokens.json", "chat_template.jinja", WEIGHTS, INDEX)
PATIENCE_S = 60
RECIPE = """
defaults: [data: files, model: folder, actor: pretrained, rollout: tiny, algorithm: grpo,
           cluster: one-process, trainer: smoke, reward: builtin, sft: none, _self_]
name: mine
model: {{path: {folder}, dtype: float32}}
data: {{train_files: [{rows}], val_files: [], train_batch_size: 8, max_prompt_length: 64,
        max_response_length: 16}}
trainer: {{total_steps: 2}}
"""


def commands(work: Path, folder: Path) -> dict[str, list[str]]:
    """Every command that takes a model's folder."""
    recipe = ["--config-dir", str(work / "recipes"), "--config-name", "mine"]
    sizes = ["--trainer", "ranks=2,tp=2", "--engines", "tp=1"]
    return {
        "plan": ["plan", *recipe],
        "transfer": ["plan", *recipe, "--transfer"],
        "auto": ["plan", *recipe, "--auto"],
        "reshard": ["reshard", "plan", "--model", str(folder), *sizes],
        "file": ["plan", "--model", str(folder / "config.json"), *sizes],
        "explain": ["train", *recipe, "--explain"],
        "import": ["checkpoint", "import", str(folder), str(work / "imported")],
        "doctor": ["doctor", "--model", str(folder)],
    }


# ---- what somebody makes of a folder


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def deep(file: Path) -> None:
    file.write_text(DEEP)


def sparse(file: Path) -> None:
    with file.open("ab") as stream:
        stream.truncate(1 << 40)


def a_list(file: Path) -> None:
    file.write_text("[]")


def wide(file: Path) -> None:
    file.write_text('{"a": [' + "[]," * 15_000_000 + "[]]}")


def a_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def no_text(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00\x01" * 100)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def steering(file: Path) -> None:
    file.write_text(json.dumps({STEER: STEER, "model_type": STEER, "architectures": [STEER]}))


FORMS = (pipe, endless, deep, sparse, a_list, wide, a_folder, no_text, empty, steering)


def _every(form: Make, folder: Path) -> None:
    for file in _files(folder):
        form(file)


def _one(form: Make, name: str, folder: Path) -> None:
    form(folder / name)


def _field(name: str, value: Any, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))


def _header(text: bytes, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def _index(weight_map: Any, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    pipe(folder / "pipe")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _tensor(**values: Any) -> bytes:
    return json.dumps(
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **values}}
    ).encode()


VALUES = ("x", [], {"a": 1}, -1, 0, 1 << 40, 1e308, float("nan"), True, 0.5, STEER)
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FIELDS += ("head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "rope_theta")
FIELDS += ("tie_word_embeddings", "max_position_embeddings", "rope_scaling", "quantization_config")
FIELDS += ("model_type", "architectures", "torch_dtype", "eos_token_id", "layer_types")
HEADERS = {
    "negative": _tensor(data_offsets=[-4, 0]),
    "offsets": _tensor(data_offsets="ab"),
    "shape": _tensor(shape="x"),
    "dtype": _tensor(dtype=3),
    "number": b'{"w": 3}',
    "list": b"[1]",
    "wide": b'{"w": [' + b"[]," * 5_000_000 + b"[]]}",
    "endless": _tensor(data_offsets=[0, 1 << 80]),
    "steering": json.dumps(
        {STEER: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode(),
}
MAPS = {
    "number": {"w": 3},
    "list": [1],
    "outside": {"w": "../a.safetensors"},
    "absolute": {"w": "/etc/passwd"},
    "dot": {"w": "."},
    "nul": {"w": "a\0b"},
    "long": {"w": "a" * 5000},
    "steering": {STEER: STEER},
    "missing": {"w": "b.safetensors"},
    "wrong": {"w": "a.safetensors"},
    "pipe": {"w": "pipe"},
    "many": {f"w{number}": f"f{number}" for number in range(1_000_000)},
}
HOSTILE: dict[str, Make] = {
    **{f"every file: {form.__name__}": partial(_every, form) for form in FORMS},
    **{f"{name}: {form.__name__}": partial(_one, form, name) for form in FORMS for name in NAMES},
    **{f"header: {name}": partial(_header, text) for name, text in HEADERS.items()},
    **{f"index: {name}": partial(_index, given) for name, given in MAPS.items()},
    **{
        f"{name}={str(value)[:8]!a}": partial(_field, name, value)
        for name in FIELDS
        for value in VALUES
    },
}


# ---- the process that runs the commands


class Reader:
    """Runs commands over spoilt copies of one good folder."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.good = published_folder("qwen3", work / "good")
        (work / "recipes").mkdir()
        row = {"data_source": "mine", "prompt": [{"role": "user", "content": "Say it."}]}
        row |= {"reward_model": {"style": "rule", "ground_truth": "x"}, "extra_info": {"index": 0}}
        pq.write_table(pa.Table.from_pylist([row] * 32), work / "rows.parquet")
        self.loaded = set[str]()

    def answers(self, kind: str, names: list[str]) -> dict[str, tuple[int, int, str, str]]:
        """What each command makes of a folder of this kind."""
        for name in names:
            if name not in self.loaded:  # its modules count for nobody
                code, _, err = run(self._words(self.good)[name])
                assert code == 0, f"{name} refuses the good folder: {err}"
                self.loaded.add(name)
        folder = self.work / "theirs"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.good, folder)
        HOSTILE[kind](folder)
        words = self._words(folder)
        return {name: in_a_fork(words[name]) for name in names}

    def _words(self, folder: Path) -> dict[str, list[str]]:
        shutil.rmtree(self.work / "imported", ignore_errors=True)
        recipe = RECIPE.format(folder=folder, rows=self.work / "rows.parquet")
        (self.work / "recipes" / "mine.yaml").write_text(recipe)
        return commands(self.work, folder)


def in_a_fork(words: list[str]) -> tuple[int, int, str, str]:
    """(status of the process, exit code, stdout, stderr)."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        signal.alarm(PATIENCE_S)
        with os.fdopen(write, "w") as out:
            json.dump(run(words), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    status = os.waitpid(pid, 0)[1]
    return (status, *json.loads(said)) if status == 0 else (status, -1, "", said)


def main(lines: Iterator[str], work: Path) -> None:
    """Answer line by line."""
    reader = Reader(work)
    for line in lines:
        kind, *names = json.loads(line)
        print(json.dumps(reader.answers(kind, names)), flush=True)


if __name__ == "__main__":
    main(iter(sys.stdin.readline, ""), Path(sys.argv[1]))
