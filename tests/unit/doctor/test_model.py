"""A verdict on a model folder: good ones have no error, and each broken one is told by its line."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.cli.main import main
from hybridflow.config.load import load_config
from hybridflow.doctor.findings import Finding, exit_code
from hybridflow.doctor.model import examine
from hybridflow.models.published import published
from tests.published.folders import FAMILIES, FAULTS, break_folder, code_ran, published_folder
from tests.published.sparse import whole_size

LONGEST_S = 60.0  # until a verdict on a folder that cannot be loaded
PROCESSOR_S = 30.0  # for a folder, which takes 8 s on two quiet cores
TEMPLATE = "chat_template.jinja"


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    """The first finding of each topic."""
    return {finding.topic: finding for finding in reversed(findings)}


def edit(path: Path, **values: Any) -> None:
    """Set fields of a JSON file; None takes one out."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def template_of(folder: Path, text: str) -> None:
    """The folder's only chat template."""
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / TEMPLATE).write_text(text)


def chatml(
    before: str = "", after: str = "<|im_end|>\n", answer: str = "<|im_start|>assistant\n"
) -> str:
    """ChatML with something before all messages, after each one, and at the start of an answer."""
    turn = f"<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{after}"
    return (
        f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt "
        f"%}}{answer}{{% endif %}}"
    )


# ---- good folders


def single_shard(folder: Path) -> None:
    published_folder("llama-3.1", folder, shards=1)


def template_as_file(folder: Path) -> None:
    published_folder("qwen2.5", folder)
    template_of(folder, chatml())


def thinking_opened(folder: Path) -> None:
    published_folder("qwen3", folder)
    template_of(folder, chatml(answer="<|im_start|>assistant\n<think>\n"))


def without_heads(folder: Path) -> None:
    published_folder("glm-4.5", folder, num_nextn_predict_layers=0)


def untied(folder: Path) -> None:
    published_folder("qwen2.5", folder, tie_word_embeddings=False)


def in_float32(folder: Path) -> None:
    published_folder("qwen3", folder, shards=1)
    [file] = folder.glob("*.safetensors")
    save_file(
        {name: tensor.float() for name, tensor in load_file(file).items()},
        file,
        metadata={"format": "pt"},
    )


def without_query_rank(folder: Path) -> None:
    published_folder("deepseek-v3", folder, q_lora_rank=None)


GOOD: dict[str, Callable[[Path], object]] = {
    **{
        family: (lambda folder, family=family: published_folder(family, folder))
        for family in FAMILIES
    },
    **{
        one.__name__: one
        for one in (single_shard, template_as_file, thinking_opened, without_heads, untied)
    },
    **{one.__name__: one for one in (in_float32, without_query_rank)},
}
QUICK = ("kimi-k2",)


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended. Other
    programs of a machine do not count."""
    return sum(
        sum(resource.getrusage(whose)[:2])
        for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in GOOD]
)
def test_a_good_folder_has_no_error(name: str, tmp_path: Path) -> None:
    GOOD[name](tmp_path)
    begun = processor_s()
    findings = examine(tmp_path)
    assert processor_s() - begun < PROCESSOR_S
    topics = by_topic(findings)
    assert exit_code(findings) == 0, [one for one in findings if one.level == "error"]
    assert topics["parity"].level == topics["export"].level == topics["answers end"].level == "ok"
    assert [
        one for one in findings if one.level == "warning" and not one.remedy
    ] == [] and not code_ran(tmp_path)


# ---- broken ones: how, and the finding that says so


def of_integers(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file, metadata={"format": "pt"})


def of_another_shape(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=8)


def with_few_rows(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {
        name: tensor[:400].clone() if name in names else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    edit(folder / "config.json", vocab_size=400)


def of_an_unknown_family(folder: Path) -> None:
    edit(folder / "config.json", model_type="mamba")


def with_another_activation(folder: Path) -> None:
    edit(folder / "config.json", hidden_act="gelu")


def without_half_of_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)


def without_template(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / TEMPLATE).unlink(missing_ok=True)


def with_an_endless_template(folder: Path) -> None:
    template_of(
        folder, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )


def with_a_growing_normalizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * 32}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def with_an_end_that_no_template_writes(folder: Path) -> None:
    template_of(folder, chatml(after="\n\n"))


def with_a_template_that_rewrites_history(folder: Path) -> None:
    template_of(folder, chatml(before="{{ messages | length }} messages\n"))


def with_a_stop_beyond_the_vocabulary(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[999_999])


BROKEN: dict[Callable[[Path], None], tuple[str, str, str]] = {
    of_integers: (
        "weights",
        "error",
        "unsupported precision: model.layers.0.mlp.up_proj.weight (I8)",
    ),
    of_another_shape: ("weights", "error", "tensors have unexpected shapes"),
    with_few_rows: ("vocabulary", "error", "the model has 400 embedding rows"),
    of_an_unknown_family: ("config", "error", "model_type 'mamba' is not supported"),
    with_another_activation: ("config", "error", "hidden_act='gelu'"),
    without_half_of_config: ("config", "error", "not JSON"),
    without_tokenizer: ("tokenizer", "error", "has no tokenizer files"),
    without_template: ("chat template", "error", "the tokenizer has no chat template"),
    with_an_endless_template: ("tokenizer", "error", "takes more than"),
    with_a_growing_normalizer: ("tokenizer", "error", "tokenizer.json is unusable"),
    with_an_end_that_no_template_writes: (
        "answers end",
        "warning",
        "answers may run to data.max_response_length",
    ),
    with_a_template_that_rewrites_history: (
        "user after an answer",
        "warning",
        "changes earlier messages",
    ),
    with_a_stop_beyond_the_vocabulary: ("vocabulary", "error", "stop ids [999999] exceed"),
}


# given up by a limit of time
LONG = (with_an_endless_template, with_a_growing_normalizer)


@pytest.fixture
def quick_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small copy is `GOOD`'s to look at."""
    monkeypatch.setattr("hybridflow.doctor.model._copy", lambda *arguments: iter(()))


@pytest.mark.usefixtures("quick_parity")
def test_a_thinking_that_the_prompt_opens_is_told(tmp_path: Path) -> None:
    thinking_opened(tmp_path)
    topics = by_topic(examine(tmp_path))
    assert "the prompt opens a thinking" in topics["chat template"].what


@pytest.mark.usefixtures("quick_parity")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one in LONG else [], id=one.__name__)
        for one in BROKEN
    ],
)
def test_a_broken_folder_is_told_by_its_line(fault: Callable[[Path], None], tmp_path: Path) -> None:
    published_folder("qwen2.5", tmp_path, shards=1)
    fault(tmp_path)
    begun = time.monotonic()
    findings = examine(tmp_path)
    assert time.monotonic() - begun < LONGEST_S
    topic, level, said = BROKEN[fault]
    found = by_topic(findings)[topic]
    assert (found.level, said in found.what) == (level, True) and found.remedy, found
    assert exit_code(findings) == (level == "error")
    assert all("Traceback" not in one.what for one in findings)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_parity")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_download_that_is_not_whole_names_the_command(fault: str, tmp_path: Path) -> None:
    published_folder("llama-3.1", tmp_path)
    file = break_folder(tmp_path, fault)
    found = by_topic(examine(tmp_path))["weights"]
    assert found.level == "error" and file.name in found.what and "hf download" in found.what


@pytest.mark.slow
@pytest.mark.usefixtures("quick_parity")
def test_a_recipe_is_planned_for_the_folder_and_another_models_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_size(tmp_path, published("qwen3-8b"))
    path = f"model.path={tmp_path}"
    topics = by_topic(examine(tmp_path, load_config("grpo-qwen3-8b-1x8", [path])))
    # it has weights alone
    assert (topics["weights"].level, topics["tokenizer"].level) == ("ok", "error")
    assert (
        topics["layout"].what == "8 ranks, TP2"
        and topics["memory"].level == topics["sync"].level == "ok"
    )
    assert by_topic(examine(tmp_path))["recipe"].remedy.startswith("--recipe grpo-qwen3-8b-1x8")
    assert (
        main(["doctor", "--model", str(tmp_path), "--recipe", "grpo-llama-3.1-8b-1x8", "--json"])
        == 1
    )
    findings = json.loads(capsys.readouterr().out)["findings"]
    [refused] = [one for one in findings if one["topic"] == "recipe" and one["level"] == "error"]
    assert "model_type=qwen3" in refused["what"] and "grpo-qwen3-8b-1x8" in refused["what"]
