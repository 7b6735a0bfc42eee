"""Metrics, TensorBoard, timeline, rollout dumps, environment and log file: what a run leaves behind
survives kills and resumes."""

from __future__ import annotations

import errno
import getpass
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.errors import ConfigError, DataError, SchemaError, StorageError
from hybridflow.observe.environment import describe_environment, write_environment
from hybridflow.observe.jsonl import JsonlWriter, number_ranges, read_jsonl
from hybridflow.observe.logfile import setup_logging, stop_logging
from hybridflow.observe.rollouts import (
    dump_path,
    dump_rollouts,
    list_dumps,
    read_rollouts,
    remove_dumps_after,
    remove_old_dumps,
)
from hybridflow.observe.timeline import Timeline, read_timeline
from hybridflow.observe.tracker import Tracker


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return (
        [(event.step, round(event.value, 5)) for event in accumulator.Scalars(tag)]
        if tag in accumulator.Tags()["scalars"]
        else []
    )


def records(run: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run / "metrics.jsonl"))


def test_metrics_reach_the_file_before_the_tracker_is_closed(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, ("jsonl",))
    tracker.log(1, {"critic/score/mean": np.float32(0.5)})
    tracker.log(0, {"val/accuracy": 0.25}, "val")
    found = records(tmp_path)
    assert [(r["step"], r["phase"]) for r in found] == [(1, "train"), (0, "val")]
    assert found[0]["critic/score/mean"] == 0.5
    assert abs(found[0]["wall_time"] - time.time()) < 60


def test_a_torn_last_line_is_left_out_and_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "phase": "train", "wall_time": 1.0, "a": 1.0}\n{"step": 2, "phase": "tr'
    )
    assert [r["step"] for r in records(tmp_path)] == [1]
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        tracker.log(2, {"a": 2.0})
    assert [(r["step"], r["a"]) for r in records(tmp_path)] == [(1, 1.0), (2, 2.0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("left", "steps"),
    [('{"step": 1}\n{"step": 2}', [1, 2, 3]), ('{"ste', [3]), ('{"step": 1}\n', [1, 3]), ("", [3])],
)
def test_every_kind_of_file_end_is_continued(tmp_path: Path, left: str, steps: list[int]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(left)
    writer = JsonlWriter(path)
    writer.write({"step": 3})
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == steps


def test_a_torn_multibyte_character_does_not_stop_the_reader(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "t": "\xe2\x82')
    assert list(read_jsonl(tmp_path / "x.jsonl")) == [{"step": 1}]


def test_a_line_that_is_no_json_by_the_standard_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss": NaN}\n{"step": 3}\n')
    assert [record["step"] for record in read_jsonl(path)] == [1, 3]


def test_lines_that_are_left_out_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    skipped = list[int]()
    deep = "[" * 100_000
    long = '{"text": "' + "x" * (17 << 20) + '"}'
    path.write_text(
        "\n".join(['{"step": 1}', "cut", deep, '{"step": 2}', long, '{"step": 3}', '{"step": 4'])
    )
    assert [record["step"] for record in read_jsonl(path, skipped)] == [1, 2, 3]
    assert skipped == [2, 3, 5, 7]
    assert (
        number_ranges(skipped) == "2-3, 5, 7"
        and number_ranges(range(1, 90, 2)) == "1, 3, 5, 7, 9, 11 and 39 more"
    )
    assert [record["step"] for record in read_jsonl(path, most_bytes=100)] == [1]


def test_records_are_read_from_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records.jsonl")
    with pytest.raises(DataError, match=r"records\.jsonl: not a regular file"):
        list(read_jsonl(tmp_path / "records.jsonl"))


@pytest.mark.parametrize("how", ["appended to", "cut back"])
def test_the_next_start_says_which_lines_it_removes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "na')
    writer = JsonlWriter(path)
    if how == "appended to":
        writer.write({"step": 4})
    else:
        writer.keep(lambda record: record["step"] < 2)
        writer.keep(lambda record: record["step"] < 2)
    writer.close()
    [said] = caplog.messages
    assert "timeline.jsonl: skipped line 3, which is not a complete record" in said


def test_a_log_that_cannot_be_written_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path)
    try:
        [file] = [
            one
            for one in logging.getLogger().handlers
            if getattr(one, "baseFilename", "").endswith("hybridflow.log")
        ]
        # the handler closes it
        monkeypatch.setattr(file, "stream", open("/dev/full", "w"))  # noqa: SIM115
        for _ in range(2):
            logging.getLogger("hybridflow").info("a record")
    finally:
        with suppress(OSError):
            stop_logging()
    said = capsys.readouterr().err
    assert said.count("could not write") == 1 and "Traceback" not in said


def test_resume_drops_later_steps_of_that_phase_alone(tmp_path: Path) -> None:
    with Tracker(tmp_path, ("jsonl", "tensorboard")) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"a": float(step)})
            tracker.log(step, {"sft/loss": float(step)}, "sft")
    with Tracker(tmp_path, ("jsonl", "tensorboard")) as tracker:
        tracker.truncate_after("train", 2)
        for step in (3, 4, 5):
            tracker.log(step, {"a": 10.0 * step})
    train = [(r["step"], r["a"]) for r in records(tmp_path) if r["phase"] == "train"]
    assert train == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert [r["step"] for r in records(tmp_path) if r["phase"] == "sft"] == [1, 2, 3, 4]
    assert scalars(tmp_path / "tensorboard", "a") == train
    assert [step for step, _ in scalars(tmp_path / "tensorboard", "sft/loss")] == [1, 2, 3, 4]


def test_truncation_works_on_an_open_tracker_and_on_an_empty_run(tmp_path: Path) -> None:
    with Tracker(tmp_path, ("jsonl", "tensorboard")) as tracker:
        tracker.truncate_after("train", 0)
        tracker.log(1, {"a": 1.0})
        tracker.truncate_after("train", 0)
        tracker.log(1, {"a": 2.0})
    assert [r["a"] for r in records(tmp_path)] == [2.0]
    assert scalars(tmp_path / "tensorboard", "a") == [(1, 2.0)]
    assert not list(tmp_path.glob(".*"))


def test_tensorboard_reads_what_was_logged_before_close(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, ("tensorboard",))
    tracker.log(1, {"critic/score/mean": 0.25, "actor/lr": 1e-6})
    tracker.log(2, {"critic/score/mean": 0.5})
    assert scalars(tmp_path / "tensorboard", "critic/score/mean") == [(1, 0.25), (2, 0.5)]
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_the_event_file_names_no_host_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from hybridflow.observe.tracker import Tracker; t = Tracker(sys.argv[1]); "
        "print('tensorboard' in sys.modules)\n"
    )
    code += "t.log(1, {'a': 1.0}); print(sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["False", "train step 1  a 1", "[]"]
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name


def test_values_that_are_not_finite_are_null_with_a_warning(tmp_path: Path) -> None:
    with Tracker(tmp_path, ("jsonl", "tensorboard")) as tracker:
        tracker.log(1, {"a": math.nan, "b": math.inf, "c": 1.0})
        tracker.truncate_after("train", 1)
    (record,) = records(tmp_path)
    assert (record["a"], record["b"], record["c"]) == (None, None, 1.0)
    assert record["warning"] == "not finite: a=nan, b=inf"
    json.loads(
        (tmp_path / "metrics.jsonl").read_text(),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown tracker; did you mean 'tensorboard'"):
        Tracker(tmp_path, ("console", "tensorbord"))
    tracker = Tracker(tmp_path, ("jsonl",))
    with pytest.raises(
        ValueError, match="phase must be one of train, val, sft, reward, got 'test'"
    ):
        tracker.log(1, {"a": 1.0}, "test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metric name 'step' is reserved"):
        tracker.log(1, {"step": 1.0})
    with pytest.raises(TypeError, match="metric 'a' must be a number"):
        tracker.log(1, {"a": "many"})  # type: ignore[dict-item]


def test_the_console_gets_the_well_known_metrics_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(tmp_path, ("console",)) as tracker:
        tracker.log(3, {"perf/throughput": 5.0, "actor/pg_loss": 0.1, "critic/score/mean": 0.5})
    assert capsys.readouterr().out == "train step 3  critic/score/mean 0.5  actor/pg_loss 0.1\n"
    assert not list(tmp_path.iterdir())


def test_timeline_nests_and_sums(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    with timeline.phase("start engines"):
        pass
    with timeline.phase("step", step=3):
        for _ in range(2):
            with timeline.phase("gen"), timeline.phase("wait"):
                time.sleep(0.02)
        with timeline.phase("adv"):
            pass
    seconds = timeline.step_seconds(3)
    assert set(seconds) == {"step", "gen", "gen/wait", "adv"}
    assert 0.04 <= seconds["gen/wait"] <= seconds["gen"] <= seconds["step"]
    assert timeline.metrics(3)["timing_s/gen"] == seconds["gen"]
    assert timeline.step_seconds(4) == {}
    found = read_timeline(tmp_path / "timeline.jsonl")
    assert [(r["name"], r["step"], r["depth"]) for r in found[:3]] == [
        ("start engines", None, 0),
        ("gen/wait", 3, 2),
        ("gen", 3, 1),
    ]
    assert all(abs(r["end"] - r["start"] - r["seconds"]) < 1e-4 for r in found)


def test_phases_overlap_that_are_begun_and_ended_by_hand(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    with timeline.phase("step", 1):
        slow = timeline.begin("update_critic")
        quick = timeline.begin("update_actor")
        quick.end()
    with timeline.phase("step", 2), timeline.phase("gen"):
        time.sleep(0.02)
        slow.end(error="WorkerError")
    found = {(one["name"], one["step"]): one for one in read_timeline(tmp_path / "timeline.jsonl")}
    critic = found["update_critic", 1]
    actor = found["update_actor", 1]
    assert (
        critic["start"] <= actor["start"]
        and critic["depth"] == 1
        and critic["error"] == "WorkerError"
    )
    assert (
        critic["seconds"] >= 0.02
        and critic["end"] > actor["end"]
        and timeline.step_seconds(1)["update_critic"] == pytest.approx(critic["seconds"], abs=1e-6)
    )


def test_a_phase_that_raises_is_recorded_and_the_nesting_survives(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    with pytest.raises(KeyboardInterrupt), timeline.phase("step", 1), timeline.phase("gen"):
        raise KeyboardInterrupt
    with timeline.phase("save"):
        pass
    assert [(r["name"], r.get("error")) for r in read_timeline(tmp_path / "timeline.jsonl")] == [
        ("gen", "KeyboardInterrupt"),
        ("step", "KeyboardInterrupt"),
        ("save", None),
    ]


def test_timeline_forgets_later_steps_on_resume(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for step in (None, 1, 2, 3):
        with timeline.phase("x", step):
            pass
    timeline.truncate_after(1)
    assert [r["step"] for r in read_timeline(tmp_path / "timeline.jsonl")] == [None, 1]
    assert timeline.step_seconds(3) == {}


def test_rollouts_come_back_with_fixed_types(tmp_path: Path) -> None:
    path = dump_path(tmp_path / "rollouts", 7)
    rows = {
        "uid": np.array([1, 1], dtype=np.int32),
        "response_text": ["a\ud800b", "<|im_end|>"],
        "ground_truth": ["4", {"answer": [1, 2]}],
        "score": np.array([1, 0]),
        "weight_version": [3, None],
        "strange": [1, "x"],
        "tokens": [np.array([1, 2]), np.array([3])],
    }
    assert dump_rollouts(path, rows).name == "step_000007.parquet"
    first, second = read_rollouts(path)
    assert first == {
        "uid": 1,
        "response_text": "a?b",
        "ground_truth": "4",
        "score": 1.0,
        "weight_version": "3",
        "strange": "1",
        "tokens": "[1, 2]",
    }
    assert (second["ground_truth"], second["weight_version"], second["strange"]) == (
        '{"answer": [1, 2]}',
        None,
        "x",
    )


def test_a_dump_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = dump_path(tmp_path, 1)
    dump_rollouts(path, {"score": [1.0]})

    def torn() -> Iterator[dict[str, list[float]]]:
        yield {"score": [2.0]}
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        dump_rollouts(path, torn())
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001.parquet"]
    assert read_rollouts(path) == [{"score": 1.0}]


def test_a_dump_on_a_full_disk_says_so_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
    with pytest.raises(
        StorageError, match=r"step_000001\.parquet: .*No space left on device; free space"
    ):
        dump_rollouts(dump_path(tmp_path, 1), {"step": [1], "score": [0.5]})
    assert list(tmp_path.iterdir()) == []


def test_pieces_of_a_dump_lie_one_after_another_in_one_file(tmp_path: Path) -> None:
    path = dump_rollouts(
        dump_path(tmp_path, 1),
        ({"score": [i, i + 0.5], "response_text": [None, str(i)]} for i in range(3)),
    )
    rows = read_rollouts(path)
    assert [row["score"] for row in rows] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [row["response_text"] for row in rows] == [None, "0", None, "1", None, "2"]


def test_wrong_rollout_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="same number of rows, got 'score': 2, 'uid': 1"):
        dump_rollouts(tmp_path / "x.parquet", {"score": [1, 2], "uid": [1]})
    with pytest.raises(SchemaError, match="column 'score': expected float"):
        dump_rollouts(tmp_path / "x.parquet", {"score": ["high"]})
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match=r"bad\.parquet: not a readable parquet file"):
        read_rollouts(tmp_path / "bad.parquet")


def test_dumps_are_listed_by_step_and_later_ones_removed(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        dump_rollouts(dump_path(tmp_path, step), {"score": [float(step)]})
    (tmp_path / "step_notes.parquet").write_text("")
    assert [step for step, _ in list_dumps(tmp_path)] == [1, 2, 10]
    assert list_dumps(tmp_path / "nowhere") == []
    assert remove_dumps_after(tmp_path, 2) == 1
    assert [step for step, _ in list_dumps(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("newest", "also_every", "left"),
    [(2, 0, [7, 9]), (1, 4, [4, 8, 9]), (9, 0, [1, 2, 4, 7, 8, 9]), (1, 1, [1, 2, 4, 7, 8, 9])],
)
def test_old_dumps_are_removed(
    tmp_path: Path, newest: int, also_every: int, left: list[int]
) -> None:
    steps = [1, 2, 4, 7, 8, 9] if also_every or newest == 9 else [1, 4, 7, 9]
    for step in steps:
        dump_rollouts(dump_path(tmp_path, step), {"score": [1.0]})
        (tmp_path / "notes.txt").write_text("mine")
    remove_old_dumps(tmp_path, newest, also_every)
    assert [step for step, _ in list_dumps(tmp_path)] == left
    assert (tmp_path / "notes.txt").exists()


def test_environment_describes_the_machine_without_naming_it(tmp_path: Path) -> None:
    found = json.loads(write_environment(tmp_path).read_text())
    assert found == json.loads(json.dumps(describe_environment()))
    assert found["packages"]["pyarrow"].count(".") == 2
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    text = json.dumps(found)
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    yield
    stop_logging()


@pytest.mark.usefixtures("quiet_logging")
def test_logging_goes_to_the_run_folder_and_only_warnings_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path / "old")
    path = setup_logging(tmp_path / "run")
    logging.getLogger("hybridflow.trainer").info("a step")
    logging.getLogger("hybridflow.trainer").warning("slow")
    logging.getLogger("some.library").info("chatter")
    text = path.read_text()
    assert path == tmp_path / "run" / "hybridflow.log"
    assert "INFO hybridflow.trainer: a step" in text
    assert "chatter" not in text
    assert text.count("slow") == 1
    assert (tmp_path / "old" / "hybridflow.log").read_text() == ""
    assert capsys.readouterr().err == "WARNING hybridflow.trainer: slow\n"
