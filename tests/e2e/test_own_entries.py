"""A run with entries from a file of the user's, named relative to where the command is given: each
is used in the processes that need it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
FILE = '''
import os
from pathlib import Path

from hybridflow.algorithms.estimators.base import estimator
from hybridflow.algorithms.policy_losses.base import policy_loss
from hybridflow.models.families.qwen3_moe import Qwen3Moe
from hybridflow.models.family import FAMILIES
from hybridflow.observe.trackers.base import tracker
from hybridflow.rewards.verifiers.base import verifier
from hybridflow.sync.transports import tcp
from hybridflow.sync.transports.base import TRANSPORTS, Transport


def used(name):
    """Leave a mark with the process that asked."""
    Path(__file__).with_name(f"{name}.{os.getpid()}").touch()


@estimator("mine")
def mine(samples, options):
    used("estimator")
    return samples.over_tokens(samples.scores - samples.scores.mean()), None


@policy_loss("reinforce", reads=("advantages", "old_log_probs"))
def reinforce(tokens, options):
    used("loss")
    return -tokens.columns["advantages"] * tokens.log_probs, {"actor/mine": tokens.log_probs.detach()}


@verifier("digits", data_sources=["arithmetic"])
def digits(response, ground_truth):
    used("verifier")
    return sum(map(ord, response)) % 7 / 7


@tracker("lines")
class Lines:
    def __init__(self, run_dir):
        used("tracker")

    def log(self, step, phase, wall_time, metrics): ...

    def truncate_after(self, phase, step): ...

    def close(self): ...


class Mine(Qwen3Moe):
    def check(self, at):
        used("family")
        super().check(at)


FAMILIES.register("qwen3_moe", Mine)


def sender(endpoint, rank, device):
    used("sender")
    return tcp.open_sender(endpoint, rank, device)


def receiver(endpoint, rank, device):
    used("receiver")
    return tcp.open_receiver(endpoint, rank, device)


TRANSPORTS.register("marked", Transport(sender, receiver))
'''


def test_entries_of_ones_own_file_are_used_by_driver_ranks_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/mine.py").write_text(FILE)
    entries = {
        "algorithm.adv_estimator": "mine",
        "actor.policy_loss": "reinforce",
        "model.family": "qwen3_moe",
        "rollout.sync.transport": "marked",
    }
    words = [
        *settings,
        "actor=tiny",
        "cluster=one-process",
        "rollout=tiny",
        "reward=builtin",
        "reward.path=null",
        f"output_dir={tmp_path}",
        "sft.steps=0",
        "trainer.total_steps=1",
        "reward.verifiers=[own/mine.py:digits]",
        "trainer.loggers=[jsonl,own/mine.py:lines]",
        *(f"{key}=own/mine.py:{name}" for key, name in entries.items()),
    ]
    with Run(tmp_path / "output", "train", *words) as run:
        assert run.end(400) == 0, run.out + run.err
    marks: dict[str, set[str]] = {}
    for file in Path("own").glob("*.[0-9]*"):
        marks.setdefault(file.stem, set()).add(file.suffix)
    assert set(marks) == {
        "estimator",
        "loss",
        "verifier",
        "tracker",
        "family",
        "sender",
        "receiver",
    }
    rank = marks["loss"]
    engine = marks["receiver"]
    assert rank | marks["estimator"] <= marks["family"] and rank == marks["sender"]
    assert not engine & rank and not (engine | rank) & marks["estimator"]
    summary = json.loads((tmp_path / "e2e" / "summary.json").read_text())
    assert summary["logprob_diff_mean"] <= 1e-4
    records = [
        json.loads(line) for line in (tmp_path / "e2e" / "metrics.jsonl").read_text().splitlines()
    ]
    assert any("actor/mine" in record for record in records)
