"""What differs between two starts of a run is named, a line each; what does not differ is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybridflow.config.schema import RunConfig
from hybridflow.saving.fingerprint import Fingerprint

TOKENS = {"vocabulary": "v1", "chat template": "t1"}
PACKAGES = {"torch": "2.13.0", "megatron-core": "0.16.1"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for name in ("train", "more", "test"):
        (tmp_path / f"{name}.parquet").write_bytes(name.encode() * 9)
    (tmp_path / "mine.py").write_text("def compute_score(): ...\n")
    default = RunConfig(name="first")
    files = tuple(str(tmp_path / f"{name}.parquet") for name in ("train", "more"))
    data = replace(default.data, train_files=files, val_files=(str(tmp_path / "test.parquet"),))
    reward = replace(default.reward, path=str(tmp_path / "mine.py"))
    return replace(default, data=data, reward=reward)


def fingerprint(config: RunConfig, **tokens: str) -> Fingerprint:
    return Fingerprint.of(
        config, TOKENS | {name.replace("_", " "): value for name, value in tokens.items()}, PACKAGES
    )


def kept(found: Fingerprint) -> Fingerprint:
    """As a checkpoint gives it back."""
    return Fingerprint.read(json.loads(json.dumps(asdict(found))))


def test_nothing_is_said_where_nothing_changed(config: RunConfig, tmp_path: Path) -> None:
    before = kept(fingerprint(config))
    assert fingerprint(config).changes(before) == []
    other = replace(config, name="second", output_dir="elsewhere")
    moved = []
    for name in config.data.train_files:
        moved.append(str(tmp_path / f"moved-{Path(name).name}"))
        Path(moved[-1]).write_bytes(Path(name).read_bytes())
    other = replace(other, data=replace(other.data, train_files=tuple(moved)))
    assert fingerprint(other).changes(before) == [] and not fingerprint(other).has_other_data(
        before, "rl"
    )
    assert fingerprint(config).changes(Fingerprint.read({})) == []  # of a version that kept none


CHANGES: dict[str, Callable[[RunConfig], RunConfig]] = {
    "algorithm.adv_estimator was": lambda c: replace(
        c, algorithm=replace(c.algorithm, adv_estimator="rloo")
    ),
    "algorithm.kl_coef was": lambda c: replace(c, algorithm=replace(c.algorithm, kl_coef=0.2)),
    "actor.optim.lr was": lambda c: replace(
        c, actor=replace(c.actor, optim=replace(c.actor.optim, lr=0.5))
    ),
    "actor.kl_loss_coef was": lambda c: replace(c, actor=replace(c.actor, kl_loss_coef=0.25)),
    "rollout.sampling.temperature was": lambda c: replace(
        c, rollout=replace(c.rollout, sampling=replace(c.rollout.sampling, temperature=0.7))
    ),
    "seed was": lambda c: replace(c, seed=99),
    "cluster.nodes was": lambda c: replace(c, cluster=replace(c.cluster, nodes=4)),
}


@pytest.mark.parametrize("line", CHANGES)
def test_each_setting_is_a_line(config: RunConfig, line: str) -> None:
    [said] = fingerprint(CHANGES[line](config)).changes(kept(fingerprint(config)))
    assert said.startswith(line) and " when the checkpoint was saved, but is " in said


def test_files_template_and_packages_are_lines(config: RunConfig, tmp_path: Path) -> None:
    before = kept(fingerprint(config))
    (tmp_path / "mine.py").write_text("def compute_score(): return 1\n")
    (tmp_path / "test.parquet").write_bytes(b"other")
    now = replace(fingerprint(config, chat_template="t2"), packages={"torch": "2.14.0"})
    said = now.changes(before)
    assert [line.split(" was ")[0].split(" has ")[0] for line in said] == [
        "data.val_files",
        "reward.path",
        "the tokenizer's chat template",
        "package megatron-core",
        "package torch",
    ]
    assert "mine.py" in said[1] and said[3].endswith("is absent now")
    assert not now.has_other_data(before, "rl")


@pytest.mark.parametrize("change", ["content", "order", "fewer"])
def test_other_rows_are_other_data(config: RunConfig, tmp_path: Path, change: str) -> None:
    before = kept(fingerprint(config))
    files = config.data.train_files
    if change == "content":
        (tmp_path / "more.parquet").write_bytes(b"other")
    files = files[::-1] if change == "order" else files[:1] if change == "fewer" else files
    now = fingerprint(replace(config, data=replace(config.data, train_files=files)))
    [said] = now.changes(before)
    named = {"content": "more.parquet", "order": "different order", "fewer": "2 files then, 1 now"}
    assert said.startswith("data.train_files has changed") and named[change] in said
    assert now.has_other_data(before, "rl") and not now.has_other_data(before, "sft")
