"""Rendered sbatch files: golden, legal bash, clean for shellcheck, and exact about words with
spaces."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.config.locate import shipped_dir
from hybridflow.errors import ConfigError
from hybridflow.launch.job import Job, nodes_of, render
from hybridflow.launch.site import Container, Environment, Site, read_site

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "slurm"
SITE = Site(
    partition="batch",
    account="team",
    time="04:00:00",
    prolog=("module load cuda/13.0",),
    environment=Environment(python="/apps/hybridflow/bin/python"),
)
JOB = Job(
    name="my run",
    words=("train", "--config-name", "big", "name='my run'", "trainer.loggers=[jsonl]"),
    workdir=Path("/data/a project"),
    out=Path("/data/a project/runs/slurm"),
    run_dir=Path("/data/a project/runs/my run"),
)
CASES: dict[str, tuple[Job, Site]] = {
    "one-node": (JOB, SITE),
    "two-nodes": (replace(JOB, nodes=2, gpus_per_node=8, spares=1), SITE),
    "64-nodes-colocated": (
        replace(JOB, nodes=64, gpus_per_node=8, array="1-3", dependency="afterok:12"),
        SITE,
    ),
    "64-nodes-split": (replace(JOB, nodes=96, gpus_per_node=8, options=("--switches=1",)), SITE),
    "heterogeneous": (
        replace(
            JOB, nodes=6, other_nodes=2, gpus_per_node=4, other_options=("--partition=rollout",)
        ),
        SITE,
    ),
    "pyxis": (
        replace(JOB, nodes=2, gpus_per_node=8),
        replace(
            SITE, container=Container("pyxis", "/images/hybridflow.sqsh", ("/models:/models",))
        ),
    ),
    "apptainer": (
        replace(JOB, nodes=2, gpus_per_node=8),
        replace(
            SITE,
            interface="ib0",
            container=Container("apptainer", "/images/hybridflow.sif", ("/models:/models",)),
        ),
    ),
    "node-local-environment": (
        replace(JOB, nodes=2),
        replace(SITE, environment=Environment("/tmp/hf/bin/python", "/data/hf.tar", "/tmp/hf")),
    ),
}


def head_of(text: str) -> str:
    """What is rendered before the body that all jobs share."""
    return text.removesuffix((shipped_dir("launch") / "slurm" / "job.sh").read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_rendered_file_is_the_golden_one(name: str) -> None:
    text = render(*CASES[name])
    assert head_of(text) == (GOLDEN / f"{name}.sbatch").read_text()
    assert text != head_of(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bash_reads_it_and_shellcheck_finds_nothing(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(render(*CASES[name]))
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", str(file)], capture_output=True, text=True, check=False
        )
        assert done.stdout == ""


def test_words_with_spaces_quotes_and_percent_arrive_as_they_are() -> None:
    words = ("train", 'name=it\'s 100% "mine"', "x=$HOME `ls`", "a=[1,2]")
    lines = head_of(render(replace(JOB, words=words), SITE)).splitlines()
    settings = "\n".join(line for line in lines if line.startswith(("TRAIN=", "WORKDIR=")))
    shown = subprocess.run(
        ["bash", "-c", settings + '\nprintf \'%s\\n\' "${TRAIN[@]}" "$WORKDIR"'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines() == [*words, "/data/a project"]


@pytest.mark.parametrize(("failures", "said"), [(0, "RUNNING 1"), (2, "RUNNING 1"), (3, "")])
def test_a_question_that_slurm_has_dropped_is_asked_again(
    failures: int, said: str, tmp_path: Path
) -> None:
    """Without an answer the job would count as unknown to Slurm, and would not be requeued."""
    body = (shipped_dir("launch") / "slurm" / "job.sh").read_text()
    function = f"again() {{{body.split('again() {')[1].split('finish() {')[0]}"
    asked = (
        f'asked() {{ echo x >> "$1"; (($(wc -l < "$1") > {failures})) && echo RUNNING 1; }}; '
        "sleep() { :; }"
    )
    lines = f'{asked}\n{function}\nread -r state < <(again asked "$0") || true\necho "${{state:-}}"'
    done = subprocess.run(
        ["bash", "-euc", lines, str(tmp_path / "count")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == said
    assert len((tmp_path / "count").read_text().split()) == min(failures + 1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 2, "other_nodes": 2}, "--other-nodes 2"),
        ({"nodes": 3, "other_nodes": 1, "spares": 1}, "--spares cannot be used with --other-nodes"),
        ({"grace_s": 0}, "--grace 0"),
        ({"name": "a\nb"}, "line breaks"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(replace(JOB, **change), SITE)


def test_an_admin_may_keep_an_edited_body(tmp_path: Path) -> None:
    body = tmp_path / "job.sh"
    body.write_text("echo edited\n")
    assert render(JOB, replace(SITE, body=str(body))).endswith("\necho edited\n")
    with pytest.raises(ConfigError, match="could not read"):
        render(JOB, replace(SITE, body=str(tmp_path / "none.sh")))


def test_the_shipped_site_file_has_every_key_and_reads_back(tmp_path: Path) -> None:
    site = read_site(shipped_dir("launch") / "slurm" / "site.yaml")
    assert site.partition == "batch" and site.limits.min_shm_gib == 16.0
    bad = tmp_path / "site.yaml"
    for text, message in (
        ("partion: x", "did you mean site.partition"),
        ("container: {kind: pyxis}", "set site.container.image"),
        ("environment: {archive: x.tar}", "must be set together"),
        ("[", "is not valid YAML"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_site(bad)
    with pytest.raises(ConfigError, match="could not read"):
        read_site(tmp_path / "absent.yaml")


@pytest.mark.slow
def test_the_number_of_nodes_follows_from_the_recipe() -> None:
    assert nodes_of(load_config("e2e", ["cluster.nodes=3"])) == 3
    assert (
        nodes_of(load_config("e2e", ["rollout.nodes_per_engine=2", "rollout.num_engines=2"])) == 4
    )
    gpus = ["cluster.devices_per_node=2", "cluster.nodes=2", "cluster.procs_per_node=2"]
    # four ranks and two engines, on GPUs of their own
    assert nodes_of(load_config("e2e", gpus)) == 3
    assert nodes_of(load_config("e2e", [*gpus, "rollout.pool=actor"])) == 2
