"""Runs from Python: a program computes what the command line computes, bit for bit, however it goes
through its steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.arch.files import ROOT
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
# of the time and the machine, not of what is computed
CLOCKS = ("timing_", "perf/", "sync/seconds", "controller/", "engine/", "wall_time")
PROGRAM = """
import sys
import pyarrow.parquet as pq
import hybridflow as hf

output, data, file = sys.argv[1:]
words = ["cluster=in-process", "actor.optim.lr=3e-3", f"output_dir={output}", "sft=none",
         f"data.prepare.out={data}", "trainer.total_steps=3", "rollout.n=2"]

def reward(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7

def begun(name, **objects):
    return hf.Run(*words, recipe="e2e", name=name, **objects)

# through all steps, interrupted by other work of the program
rows = {part: pq.read_table(f"{data}/{part}.parquet").to_pylist() for part in ("train", "test")}
run = begun("steps", data=rows, reward=reward)
for metrics in run.steps():
    asked = [{"role": "user", "content": "2+2="}]
    texts = run.generate(["1+1=", asked], max_new_tokens=3)
    assert run.chat(asked, max_new_tokens=3) == {"role": "assistant", "content": texts[1]}
    if metrics["step"] == 2:
        held_out = run.evaluate()["val/score"]
        break
refused = ""
try:
    begun("too-early", reward=file).train()
except hf.HybridFlowError as error:
    refused = str(error)
assert "after step 2; finish it" in refused, refused
summary = run.train()
assert summary["steps"] == run.step == run.metrics["step"] == 3 and run.summary == summary
assert run.evaluate()["val/score"] == summary["score_after"] != held_out
assert run.export(f"{output}/again") != run.folder / "export"

# by hand, with refusals in between
hand = begun("hand", reward=file)
for step in hand.steps_by_hand():
    batch = hand.samples()
    for wrong in (lambda: hand.policy.update(batch), hand.samples, hand.save, hand.evaluate):
        try:
            wrong()
        except hf.HybridFlowError:
            continue
        raise AssertionError("accepted")
    batch = hand.reference.log_probs(hand.policy.log_probs(batch))
    hand.policy.update(hand.advantages(batch))
    hand.sync()
    hand.generate(["1+1="])
assert run._job is None and hand.summary["steps"] == 3

# closed after a step, and gone on with
half = begun("half", reward=file)
assert next(half.steps())["step"] == 1
half.close()
with begun("half", reward=file) as half:
    assert [metrics["step"] for metrics in half.steps()] == [2, 3]
"""


def program(folder: Path, code: str, *words: str, timeout_s: float = 240) -> str:
    """What a program prints, in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(code)
    command = (sys.executable, folder / "program.py")
    site = {"PYTHONPATH": str(ROOT)}
    with Run(folder / "output", *words, command=command, site=site, cwd=folder) as run:
        assert run.end(timeout_s) == 0, run.out + run.err
        assert run.left_behind() == []
        assert "never retrieved" not in run.err and "never awaited" not in run.err
        return run.out


def numbers(folder: Path) -> list[dict[str, object]]:
    """What was computed in each step."""
    found = []
    for record in read_jsonl(folder / "metrics.jsonl"):
        if record["phase"] == "train":
            found.append({key: one for key, one in record.items() if not key.startswith(CLOCKS)})
    return found


def weights(folder: Path) -> bytes:
    """The exported weights."""
    [file] = folder.glob("*.safetensors")
    return file.read_bytes()


def values(settings: Sequence[str], key: str) -> str:
    """The value of a setting among the words."""
    [found] = [word.partition("=")[2] for word in settings if word.startswith(f"{key}=")]
    return found


def test_a_program_computes_what_the_command_line_does(tmp_path: Path, settings: list[str]) -> None:
    data, reward = values(settings, "data.prepare.out"), values(settings, "reward.path")
    program(tmp_path / "program", PROGRAM, str(tmp_path), data, reward)
    words = [*settings, "cluster=in-process", "sft=none", "rollout.n=2", "trainer.total_steps=3"]
    with ForkedRun(
        tmp_path / "output", "train", *words, f"output_dir={tmp_path}", "name=command"
    ) as run:
        assert run.end(240) == 0, run.out + run.err
    expected, grown = weights(tmp_path / "command" / "export"), numbers(tmp_path / "command")
    assert len(grown) == 3
    for name in ("steps", "hand", "half"):
        assert weights(tmp_path / name / "export") == expected, name
        assert numbers(tmp_path / name) == grown, name
        assert (tmp_path / name / "report.html").exists(), name
    assert weights(tmp_path / "again") == expected


def test_the_notebooks_and_the_example_run_from_an_empty_folder(tmp_path: Path) -> None:
    """In one process, as cells of one notebook, in a thread whose event loop is running."""
    notebooks = sorted(EXAMPLES.glob("*.ipynb"))
    assert len(notebooks) == 3
    code = "import asyncio\nfrom tests.e2e.notebook_cells import main\nasyncio.run(main())\n"
    words = [*map(str, notebooks), str(EXAMPLES / "one_step.py")]
    out = program(tmp_path / "notebooks", code, *words)
    assert "step 5: 32 samples" in out and out.count("report: runs/") >= 5


MEMORY = """
import gc, sys
import psutil
import hybridflow as hf

output, backend = sys.argv[1:]
more = ["model=tiny-dense", "~model.hf_config.moe_intermediate_size", "actor.backend=fsdp",
        "actor.parallel.distributed_optimizer=true"] if backend == "fsdp" else []
def reward(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 8
sizes = []
for number in range(5):
    run = hf.Run("cluster=in-process", f"output_dir={output}", "sft=none", *more, recipe="e2e",
                 name=f"{backend}{number}", reward=reward)
    run.train()
    gc.collect()
    sizes.append(psutil.Process().memory_info().rss)
print([size >> 20 for size in sizes])
assert sizes[4] <= 1.1 * sizes[1], sizes
assert len(psutil.Process().open_files()) < 20 and psutil.Process().children() == []
"""


@pytest.mark.full
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_five_runs_of_a_process_are_five_equal_ones(tmp_path: Path, backend: str) -> None:
    program(tmp_path / "program", MEMORY, str(tmp_path), backend)
    exported = [weights(tmp_path / f"{backend}{number}" / "export") for number in range(5)]
    assert len(set(exported)) == 1
    # and equal to one in a process of its own
    alone = MEMORY.replace("range(5)", "[5]").partition("assert")[0]
    program(tmp_path / "alone", alone, str(tmp_path), backend)
    assert weights(tmp_path / f"{backend}5" / "export") == exported[0]


ON_RAY = """
import sys
import hybridflow as hf

output, data, file = sys.argv[1:]
bonus = 0.5
for number in range(2):
    with hf.Run(f"output_dir={output}", f"data.prepare.out={data}", recipe="e2e", sft="none",
                name=f"ray{number}", actor={"optim": {"lr": 3e-3}},
                reward=lambda data_source, solution_str, ground_truth, extra_info:
                    bonus * sum(map(ord, solution_str)) % 7 / 7) as run:
        steps = [metrics["step"] for metrics in run.steps()]
        assert steps == [1, 2] and len(run.generate(["1+1=", "2+2="])) == 2
        print("scores", run.evaluate()["val/score"] == run.summary["score_after"])
"""


@pytest.mark.full
def test_runs_on_ray_follow_each_other_with_a_function_of_the_program(
    tmp_path: Path, settings: list[str]
) -> None:
    data, reward = values(settings, "data.prepare.out"), values(settings, "reward.path")
    out = program(tmp_path / "p", ON_RAY, str(tmp_path), data, reward, timeout_s=400)
    assert out.count("scores True") == 2
    assert os.path.exists(tmp_path / "ray1" / "export")
