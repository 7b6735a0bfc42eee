"""Folders of somebody else that a command copies from: `checkpoint export` (a checkpoint, a
published model, a tokenizer) and `prepare --source` (a data set). Each ends with a result or one
message, within 1 GiB and 5 s of the processor."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hybridflow.saving.manifest import INDEX, MANIFEST, Manifest, digest_of, write_json
from hybridflow.saving.rectangles import Rectangle, write_tensors
from tests.published.folders import published_folder
from tests.security.foreign import STEER, reseal
from tests.security.foreign_models import FIELDS, FORMS, VALUES, WEIGHTS, in_a_fork
from tests.security.read_foreign import run
from tests.unit.data.published_files import FILES, fill
from tests.unit.saving.lies import lie_about

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
FORM = {form.__name__: form for form in FORMS}
COPIED = (
    "config.json",
    WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
TASKS = ("gsm8k", "math500", "deepscaler", "mbpp")  # parquet, jsonl, json, parquet of code
LIES = {"dtype": ("x", 3, None, "int8", STEER), "lora": ([], {"rank": "x"}, {"rank": 1 << 40})}
FEW = {(WEIGHTS, "pipe"), ("tokenizer.json", "sparse"), ("gsm8k", "pipe"), ("math500", "deep")}
FEW |= {("deepscaler", "a_list")}
ROWS = ([], 3, {}, {"question": 3, "answer": None}, {STEER: STEER}, {"problem": {"a": [1]}})


def told(words: list[str]) -> int:
    status, code, out, err = in_a_fork(words)
    assert status == 0, f"ended by {status} {err}"
    assert code in (0, 1, 2) and "Traceback" not in err and (code != 0) == bool(err), (code, err)
    assert not STEERING.search(out + err), (out, err)
    return code


class Export:
    """A checkpoint of a tiny model, next to the folder that it came from."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.model = published_folder("qwen3", work / "model")
        self.policy = work / "run" / "checkpoints" / "global_step_1" / "policy"
        self.policy.mkdir(parents=True)
        tensors = load_file(self.model / WEIGHTS)
        whole = [
            Rectangle(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())
            for name, tensor in tensors.items()
        ]
        self.chunks, _ = write_tensors(self.policy, 0, whole)
        self.hf = [
            [name, [0] * tensor.dim(), list(tensor.shape), name, [0] * tensor.dim()]
            for name, tensor in tensors.items()
        ]
        self.write()
        assert told(self.words()) == 0

    def words(self, *more: str) -> list[str]:
        shutil.rmtree(self.work / "out", ignore_errors=True)
        return ["checkpoint", "export", str(self.policy), str(self.work / "out"), *more]

    def write(self, index: Any = None) -> None:
        """The index as it is given, with the right hashes."""
        write_json(self.policy / INDEX, index or {"chunks": self.chunks, "hf": self.hf})
        files = {
            file.name: digest_of(file) for file in self.policy.iterdir() if file.name != MANIFEST
        }
        config = json.loads((self.model / "config.json").read_text())
        layout, versions = {"world": 1}, {"torch": "x"}
        created = "2026-01-01T00:00:00Z"
        Manifest("rl", 1, ("model",), layout, "float32", config, versions, created, files).write(
            self.policy
        )


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Export]:
    work = tmp_path_factory.mktemp("export")
    made = Export(work)
    code, _, err = run(made.words())  # its modules count for nobody
    assert code == 0, err
    yield made


def test_a_checkpoints_config_that_no_model_has_is_one_message(export: Export) -> None:
    for field, value in (("num_hidden_layers", 1 << 40), ("hidden_size", "x"), ("model_type", [])):
        _with_config(export, field, value)
    export.write()


@pytest.mark.full
@pytest.mark.parametrize("field", FIELDS)
def test_each_field_of_a_checkpoints_config(export: Export, field: str) -> None:
    for value in VALUES:
        _with_config(export, field, value)
    export.write()


def _with_config(export: Export, field: str, value: Any) -> None:
    export.write()
    config = json.loads((export.model / "config.json").read_text())
    reseal(export.policy / MANIFEST, hf_config={**config, field: value})
    told(export.words())


@pytest.mark.full
@pytest.mark.parametrize("field", LIES)
def test_other_fields_of_a_manifest(export: Export, field: str) -> None:
    for value in LIES[field]:
        for more in ((), ("--adapter",)):
            export.write()
            reseal(export.policy / MANIFEST, **{field: value})
            told(export.words(*more))
    export.write()


@pytest.mark.parametrize("lies", [3, pytest.param(100, marks=pytest.mark.full)])
def test_an_index_that_lies_is_one_message(export: Export, lies: int) -> None:
    drawn = random.Random(lies)
    codes = []
    for _ in range(lies):
        value = json.loads(json.dumps({"chunks": export.chunks, "hf": export.hf}))
        lie_about(value, drawn)
        export.write(value)
        codes.append(told(export.words()))
    export.write()
    assert any(codes)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in FEW else pytest.mark.full)
        for name in COPIED
        for form in FORM
    ],
)
def test_what_is_copied_along_is_read_within_bounds(
    export: Export, tmp_path: Path, name: str, form: str
) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(export.model, theirs)
    FORM[form](theirs / name)
    told(export.words("--published", str(theirs), "--tokenizer", str(theirs)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The modules that the tasks need are loaded, which count for nobody."""
    work = tmp_path_factory.mktemp("prepare")
    for task in TASKS:
        source = fill(work / task, FILES[task])
        code, _, err = run(
            ["prepare", task, "--source", str(source), "--out", str(work / f"{task}-out")]
        )
        assert code == 0, err


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("task", "form"),
    [
        pytest.param(task, form, marks=() if (task, form) in FEW else pytest.mark.full)
        for task in TASKS
        for form in FORM
    ],
)
def test_a_data_set_of_somebody_else_is_one_message(tmp_path: Path, task: str, form: str) -> None:
    source = fill(tmp_path / "theirs", FILES[task])
    for file in filter(Path.is_file, sorted(source.rglob("*"))):
        FORM[form](file)
    out = tmp_path / "out"
    assert told(["prepare", task, "--source", str(source), "--out", str(out)]) != 0
    assert not list(out.glob("*.parquet"))


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("row", ROWS)
def test_rows_that_no_data_set_has_are_one_message(tmp_path: Path, row: Any) -> None:
    for task in ("math500", "deepscaler"):
        source = fill(tmp_path / task, {name: [row] for name in FILES[task]})
        words = ["prepare", task, "--source", str(source), "--out", str(tmp_path / f"{task}-out")]
        assert told(words) != 0
