"""The command line: what is wrong is one message; reports in every form; archives and baselines."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.bench.result import NotRun, read, write
from hybridflow.cli.main import main
from tests.unit.bench.samples import METRICS, simulated

ENTRY = """
from hybridflow.bench.measurements.base import measurement
from hybridflow.bench.result import Metric, Reference

@measurement("{name}", "micro")
def entry(place):
    "two values"
    {body}
    yield Metric("{name}", "mine/seconds", "s", "lower", (1.0,) * 5, Reference("limit", (0.5,) * 5))
"""


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def call(words: Sequence[object], status: int = 0) -> str:
        assert main(["bench", *map(str, words)]) == status, capsys.readouterr()
        out = capsys.readouterr()
        return out.out + out.err

    return call


def save(folder: Path, seed: int, slow: float = 1.0, nodes: tuple[str, ...] = ("",)) -> Path:
    """A run whose metric room1 is `slow` times as slow on its last node."""
    result = simulated(seed, nodes, {(nodes[-1], "room1/seconds"): slow})
    write(folder / "result.json", replace(result, started=f"2026-01-{seed:02}T00:00:00Z"))
    (folder / "logs").mkdir()
    (folder / "logs" / "one.log").write_text("a line")
    return folder


def test_a_slower_run_fails_by_name_and_an_equal_one_passes(tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    a, b, c = (
        save(tmp_path / name, seed, slow)
        for name, seed, slow in (("a", 1, 1.0), ("b", 2, 1.0), ("c", 3, 1.3))
    )
    assert f"passed: {METRICS} metrics judged" in said(["compare", a, b])
    assert said(["compare", a, c], 1).splitlines()[-1] == "failed; slower: room1/seconds"
    assert "failed" in said(["compare", a, c / "result.json"], 1)


@pytest.mark.slow
def test_a_baseline_of_several_runs_judges_a_run_of_the_same_hardware(tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    runs = [save(tmp_path / f"run{seed}", seed) for seed in (1, 2, 3)]
    words = ["--baselines", tmp_path / "baselines"]
    assert "3 run(s)" in said(["baseline", *runs, *words])
    assert "passed" in said(["compare", save(tmp_path / "new", 4), *words])
    assert "slower: room1/seconds" in said(["compare", save(tmp_path / "slow", 5, 1.3), *words], 1)


def test_a_baseline_of_other_hardware_is_refused_with_what_differs(tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    run = save(tmp_path / "a", 1)
    words = ["--baselines", tmp_path / "baselines"]
    said(["baseline", run, *words])
    other = read(run / "result.json")
    hardware = {**other.fingerprint["hardware"], "cores": 96}
    write(
        tmp_path / "b.json", replace(other, fingerprint={**other.fingerprint, "hardware": hardware})
    )
    assert (
        "no baseline of micro for this hardware (an existing baseline differs in cores: 2 → 96)"
        in said(["compare", tmp_path / "b.json", *words], 2)
    )
    assert "different hardware" in said(["compare", run, tmp_path / "b.json"], 3)
    assert "different types of machines" in said(["baseline", run, tmp_path / "b.json", *words], 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "mirco"], "no suite or measurement named mirco; did you mean micro?"),
        (["run", "colums"], "did you mean columns?"),
        (["run", "nowhere/my.py:entry"], "not found"),
        (["run", "gate", "trise=3"], "trise=3: no such setting; settings: tries=20"),
        (["run", "gate", "tries"], "no such setting"),
        (["run", "gate", "tries=many"], "tries=many: the value must be of type int"),
        (["run", "columns", "rounds=3"], "settings: none"),
        (["run", "micro", "rounds=3"], "a suite takes no settings"),
        (["run", "micro", "--node", "a", "--nodes", "b", "c"], "got --node 'a' --nodes b c"),
        (["compare", "absent.json"], "cannot be read"),
        (["compare", ".", "."], "no result.json found"),
        (["report", "."], "no result.json found"),
        (["archive", "absent"], "no such folder"),
        (["compare", "absent.json", "b", "--bound", "-1"], "must be a fraction"),
    ],
)
def test_what_is_wrong_is_one_message(
    tmp_path: Path, monkeypatch, said, words: list[str], message: str
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    text = said(words, 2)
    assert message in text and "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_reports_in_every_form(tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    save(tmp_path / "a", 1, nodes=("n1", "n2", "n3"))
    last = save(tmp_path / "b", 2, 1.4, nodes=("n1", "n2", "n3"))
    result = read(last / "result.json")
    write(last / "result.json", replace(result, not_run=(NotRun("kernels", "it needs a <GPU>"),)))
    table = said(["report", last])
    assert (
        "node n3 stands out: room1/seconds" in table
        and "not run: kernels: it needs a <GPU>" in table
    )
    assert json.loads(said(["report", last, "--format", "json"]))["suite"] == "micro"
    said(["report", tmp_path, "--format", "html", "--out", tmp_path / "page.html"])
    page = (tmp_path / "page.html").read_text()
    assert (
        "Nodes that stand out" in page
        and "the last of 2 runs" in page
        and page.count("<svg") == METRICS
    )
    assert "it needs a &lt;GPU&gt;" in page and "http://" not in page.replace(
        "http://www.w3.org", ""
    )
    assert said(["report", last, "--strict"], 1)


def test_the_prometheus_file_has_one_sample_a_line_in_the_exposition_form(
    tmp_path: Path, said
) -> None:  # type: ignore[no-untyped-def]
    import re

    run = save(tmp_path / "a", 1, 1.4, nodes=("n1", 'n"2', "n3"))
    text = said(["report", run, "--format", "prometheus"])
    label = r'\w+="(?:[^"\\\n]|\\.)*"'
    sample = re.compile(rf"hybridflow_bench_\w+\{{{label}(?:,{label})*\}} [-+0-9.e]+")
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert len(lines) > 6 * METRICS and all(sample.fullmatch(line) for line in lines)
    assert 'hybridflow_bench_node_excess{suite="micro",metric="room1/seconds",node="n3"}' in text


def test_an_archive_has_results_and_logs_without_names_of_users(tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    run = save(tmp_path / "a run", 1)
    said(["archive", run])
    with tarfile.open(tmp_path / "a run.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["a run/logs/one.log", "a run/result.json"]
        assert {(entry.uid, entry.uname) for entry in tar.getmembers()} == {(0, "")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("pass", ""),
        ("raise ValueError('broken')", "ValueError: broken"),
        ("raise OSError(28, 'No space left on device')", "No space left on device; free space"),
        ("import os; os._exit(9)", "it exited with status 9 without any output"),
    ],
)
def test_what_a_measurement_dies_of_is_in_the_result(
    tmp_path: Path, said, body: str, why: str
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "my.py").write_text(ENTRY.format(name="entry", body=body))
    text = said(["run", f"{tmp_path}/my.py:entry", "--out", tmp_path / "run"], int(bool(why)))
    found = read(tmp_path / "run" / "result.json")
    if why:
        assert why in found.not_run[0].why and why in text and not found.metrics
    else:
        assert [metric.share for metric in found.metrics] == [0.5] and not found.not_run
        assert (
            found.fingerprint["hardware"]["cores"] and (tmp_path / "run" / "report.html").exists()
        )


def test_nodes_measure_into_one_folder_and_the_report_joins_them(tmp_path: Path, said) -> None:  # type: ignore[no-untyped-def]
    for node in ("n1", "n2"):
        write(tmp_path / "nodes" / f"{node}.json", simulated(1, (node,)))
    assert "n1, n2" in said(["report", tmp_path])


def test_the_list_names_each_suite_and_what_needs_a_gpu(said) -> None:  # type: ignore[no-untyped-def]
    text = said(["list"])
    for suite in ("preflight", "micro", "rollout", "train", "full", "scale"):
        section = text.split(f"{suite}: ")[1].split("\n")[1]
        assert section.startswith("  "), f"{suite} has no measurement"
    for name in ("conversations", "dispatch", "reshard_transfer", "trl_steps"):
        assert name in text.split("not in a suite, run by name: ")[1]


def test_a_job_of_a_suite_is_bash_and_has_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYBRIDFLOW_SITE", raising=False)
    assert main(["slurm", "render", "--bench", "preflight", "--nodes", "3"]) == 0
    text = capsys.readouterr().out
    assert (
        "#SBATCH --nodes=3\n" in text
        and "TRAIN=(bench run preflight)\n" in text
        and "RAY_AUTH" not in text
    )
    (tmp_path / "job.sbatch").write_text(text)
    # SC2034: settings that only a training job's body uses
    for words in (
        ["bash", "-n"],
        *([["shellcheck", "-e", "SC2034"]] if shutil.which("shellcheck") else []),
    ):
        assert (
            subprocess.run([*words, "job.sbatch"], check=False, capture_output=True).returncode == 0
        ), words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bench", "preflght"], "did you mean preflight?"),
        (["--bench", "micro", "--config-name", "tiny-moe-grpo"], "remove --config-name"),
        ([], "--config-name is missing"),
    ],
)
def test_a_wrong_job_of_a_suite_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "render", *words]) == 2
    assert message in capsys.readouterr().err
