"""Reading what a run appends, over restarts, replaced files, and files that no run writes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from hybridflow.observe.jsonl import MOST_LINE_BYTES, JsonlWriter, read_jsonl
from hybridflow.observe.run_folder import load_run
from hybridflow.observe.tracker import Tracker
from hybridflow.observe.watch.follow import Follower
from hybridflow.observe.watch.live_run import LiveRun


@pytest.mark.parametrize("seed", range(5))
def test_what_was_followed_is_what_a_reader_finds(tmp_path: Path, seed: int) -> None:
    """A writer appends bytes of lines cut anywhere, some damaged, and sometimes replaces the
    file."""
    rng = random.Random(seed)
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    followed: list[dict[str, object]] = []
    written = b""
    rest = b""
    for step in range(200):
        event = rng.random()
        if event < 0.05:
            kept = list(read_jsonl(path))[: rng.randrange(1, 20)]
            writer = JsonlWriter(path)
            steps = {record["step"] for record in kept}
            writer.keep(lambda record, steps=steps: record["step"] in steps)
            writer.close()
            written = path.read_bytes() if path.exists() else b""
            rest = b""
        line = (
            b"{broken\n" if event > 0.9 else json.dumps({"step": step, "é": "ü"}).encode() + b"\n"
        )
        rest += line
        cut = rng.randrange(len(rest) + 1)
        with path.open("ab") as file:
            file.write(rest[:cut])
        written += rest[:cut]
        rest = rest[cut:]
        if rng.random() < 0.5:
            restarted, records = follower.read()
            followed = records if restarted else followed + records
    restarted, records = follower.read()
    followed = records if restarted else followed + records
    whole = written[: written.rfind(b"\n") + 1].splitlines()
    assert len(followed) > 5
    assert followed == [json.loads(line) for line in whole if line != b"{broken"]
    assert follower.skipped == whole.count(b"{broken")


def test_a_line_longer_than_a_record_is_skipped_without_being_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n' + b"x" * (2 * MOST_LINE_BYTES + 5))
        file.flush()
        found = [follower.read()[1] for _ in range(4)]
        file.write(b'x\n{"a": 2}\n')
        file.flush()
        found += [follower.read()[1] for _ in range(2)]
    assert [one for records in found for one in records] == [{"a": 1}, {"a": 2}]
    assert follower.skipped == 1


def test_a_file_that_is_written_again_in_place_is_read_again(tmp_path: Path) -> None:
    """Its number stays, and it is no shorter."""
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert follower.read() == (False, [{"a": 1}, {"a": 2}])
    with path.open("r+") as file:
        file.write('{"b": 1}\n{"b": 2}\n{"b": 3}\n')
    assert follower.read() == (True, [{"b": 1}, {"b": 2}, {"b": 3}])


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_not_a_file_of_the_folder_is_not_read(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text('{"secret": 1}\n')
    path = run / "metrics.jsonl"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda name: name.symlink_to("../secret")}[
        kind
    ](path)
    follower = Follower(path)
    assert follower.read() == (False, [])
    assert follower.remark


def test_a_live_run_is_at_every_moment_the_run_that_the_report_reads(tmp_path: Path) -> None:
    """Over a start, a resume from an earlier step, and the end."""
    live = LiveRun(tmp_path)
    assert not live.poll() and live.run.metrics == []
    tracker = Tracker(tmp_path, ("jsonl",))
    for step in range(1, 11):
        tracker.log(step, {"critic/score/mean": step / 10})
        assert live.poll() and live.run.metrics[-1]["step"] == step
    assert not live.poll()
    version = live.version
    tracker.truncate_after("train", 4)
    (tmp_path / "changes.jsonl").write_text(
        '{"phase": "rl", "step": 4, "changes": ["lr: 1 -> 2"]}\n'
    )
    tracker.log(5, {"critic/score/mean": 0.9})
    assert live.poll() and live.version == version + 1
    assert live.run.points("train", "critic/score/mean")[-2:] == [(4, 0.4), (5, 0.9)]
    assert live.run.changes[0]["changes"] == ["lr: 1 -> 2"]
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    (tmp_path / "config.yaml").write_text("name: mine\n")
    assert live.poll() and live.run.summary == {"status": "finished"}
    tracker.close()
    there = load_run(tmp_path)
    for name in ("metrics", "timeline", "config", "summary", "environment", "changes"):
        assert getattr(live.run, name) == getattr(there, name), name
    assert set(live.run.missing) <= set(there.missing)
