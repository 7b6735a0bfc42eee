"""One timeline of all processes: recording, joining on one clock, and the Perfetto trace, which is
read back with Perfetto's own protobufs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from hybridflow.cli.main import main
from hybridflow.errors import DataError
from hybridflow.observe import spans
from hybridflow.observe.joined_timeline import (
    JoinedTimeline,
    Process,
    Span,
    busy_seconds,
    join,
    lanes,
)
from hybridflow.observe.perfetto_trace import write_trace
from hybridflow.observe.spans import SpanFile, ahead

T = 1_764_255_600.0


def nested(rng: np.random.Generator, start: float, end: float, depth: int = 0) -> list[Span]:
    """Random spans as a thread makes them."""
    found = []
    at = start
    while depth < 4 and at < end:
        at += rng.exponential((end - start) / 6)
        last = at + rng.exponential((end - start) / 6)
        if last < end:
            found.append(Span(f"s{rng.integers(1000)}", at, last))
            found += nested(rng, at, last, depth + 1)
        at = last
    return found


def disjoint_or_nested(a: Span, b: Span) -> bool:
    inside = (a.start <= b.start and b.end <= a.end) or (b.start <= a.start and a.end <= b.end)
    return inside or a.end <= b.start or b.end <= a.start


@pytest.mark.parametrize("seed", range(5))
def test_lanes_nest_and_lose_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stack = nested(rng, T, T + 100)
    assert len(lanes(stack)) <= 1
    loose = [Span(str(i), T + a, T + a + d) for i, (a, d) in enumerate(rng.random((60, 2)) * 20)]
    found = lanes([*stack, *loose])
    assert sorted(repr(span) for lane in found for span in lane) == sorted(
        map(repr, [*stack, *loose])
    )
    for lane in found:
        assert all(disjoint_or_nested(a, b) for a in lane for b in lane)
    grid = np.arange(T, T + 120, 0.01)
    covered = np.zeros(len(grid), bool)
    for span in loose:
        covered |= (grid >= span.start) & (grid < span.end)
    assert busy_seconds(loose, T, T + 120) == pytest.approx(covered.sum() * 0.01, abs=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_the_trace_has_each_span_counter_and_mark(seed: int, tmp_path: Path) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    rng = np.random.default_rng(seed)
    one = Process("driver", {"main": nested(rng, T, T + 60)})
    other = Process(
        "actor-rank0",
        {"main": nested(rng, T, T + 60), "checkpoint": [Span("write", T + 1, T + 9, 3)]},
        {"requests": [(T + 1, 4.0), (T + 2, 0.0)]},
        [(T + 5, "no answer")],
    )
    slices = write_trace(JoinedTimeline([one, other]), tmp_path / "trace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "trace").read_bytes())
    names: dict[int, str] = {}
    stacks: dict[int, list[tuple[str, int]]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    read = []
    values = []
    marks = []
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            names[described.uuid] = described.process.process_name or described.name
            assert not described.parent_uuid or described.parent_uuid in names
            continue
        event = packet.track_event
        assert event.track_uuid in names and packet.timestamp >= last[event.track_uuid]
        last[event.track_uuid] = packet.timestamp
        if event.type == event.TYPE_SLICE_BEGIN:
            stacks[event.track_uuid].append((event.name, packet.timestamp))
        elif event.type == event.TYPE_SLICE_END:
            name, start = stacks[event.track_uuid].pop()
            read.append((name, start / 1e9, packet.timestamp / 1e9))
        elif event.type == event.TYPE_COUNTER:
            values.append((packet.timestamp / 1e9, event.double_counter_value))
        else:
            marks.append((packet.timestamp / 1e9, event.name))
    assert not any(stacks.values()) and slices == len(read)
    wanted = [
        (s.name if s.step is None else f"{s.name} {s.step}", s.start, s.end)
        for process in (one, other)
        for thread in process.threads.values()
        for s in thread
    ]
    assert [name for name, *_ in sorted(read)] == [name for name, *_ in sorted(wanted)]
    for (_, *got), (_, *given) in zip(sorted(read), sorted(wanted), strict=True):
        assert got == pytest.approx(given, abs=1e-6)  # doubles of today have steps of 0.2 us
    assert values == [(pytest.approx(T + 1), 4.0), (pytest.approx(T + 2), 0.0)]
    assert marks == [(pytest.approx(T + 5), "no answer")]
    assert {"driver", "actor-rank0", "checkpoint", "requests", "events"} <= set(names.values())


def test_what_is_recorded_is_joined_on_the_drivers_clock(tmp_path: Path) -> None:
    (tmp_path / "timeline.jsonl").write_text(
        json.dumps({"name": "step", "step": 1, "start": T, "end": T + 10, "seconds": 10}) + "\n"
    )
    logs = tmp_path / "logs"
    driver = SpanFile(logs / "driver.spans.jsonl", "driver")
    driver.count("requests of engine-0", 0)  # as before: nothing is written
    driver.count("requests of engine-0", 3)
    driver.count("requests of engine-0", 3)
    driver.mark("no answer from rank 1")
    driver.write({"clock": "actor rank 1", "ahead": 100.0, "within": 0.002})
    driver.close()
    for rank, clock in ((0, 0.0), (1, 100.0)):
        file = SpanFile(logs / f"actor-rank{rank}.spans.jsonl", f"actor rank {rank}")
        file.span("update_policy", T + 2 + clock, 3.0)
        thread = threading.Thread(
            target=file.span, args=("write checkpoint", T + 3 + clock, 4.0), name="checkpoint"
        )
        thread.start()
        thread.join()
        file.close()
    found = join(tmp_path)
    assert [one.name for one in found.processes] == ["driver", "actor-rank0", "actor-rank1"]
    for one in found.processes[1:]:
        assert one.threads["main"] == [Span("update_policy", T + 2, T + 5)]
        assert one.threads["checkpoint"] == [Span("write checkpoint", T + 3, T + 7)]
    assert found.processes[2].clock_error == 0.002
    [(_, value)] = found.processes[0].counters["requests of engine-0"]
    assert value == 3 and [text for _, text in found.processes[0].marks]
    assert found.missing == [] and found.steps()[1].end == T + 10
    assert found.between(T + 6, T + 8).processes[1].threads["main"] == []


def test_a_process_without_a_file_records_nothing_and_one_with_a_file_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "_current", None)
    with spans.span("nothing"):
        spans.count("nothing", 1)
    file = spans.record_to(tmp_path / "logs" / "a.spans.jsonl", "a")
    with pytest.raises(KeyError), spans.span("fails"):
        time.sleep(0.02)
        raise KeyError
    header, record = map(json.loads, file.path.read_text().splitlines())
    assert header["process"] == "a" and header["pid"] == os.getpid() and header["boot"]
    assert record["name"] == "fails" and 0.02 <= record["seconds"] < 2
    file.close()
    with spans.span("after it was closed"):
        pass
    assert len(file.path.read_text().splitlines()) == 2


def test_a_file_is_bounded_and_a_full_disk_ends_only_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spans, "_MOST_BYTES", 4000)
    file = SpanFile(tmp_path / "a.spans.jsonl", "a")
    for number in range(200):
        file.span(f"s{number}", T, 1.0)
    kept = [*tmp_path.iterdir()]
    assert len(kept) == 2 and all(one.stat().st_size < 4200 for one in kept)
    assert '"s199"' in file.path.read_text() and '"process": "a"' in file.path.read_text()
    (tmp_path / "full.spans.jsonl").symlink_to("/dev/full")
    full = SpanFile(tmp_path / "full.spans.jsonl", "b")
    full.span("s", T, 1.0)
    assert "no further spans are recorded: " in capsys.readouterr().err


def test_a_clock_is_read_within_half_of_the_round_trip() -> None:
    rng = np.random.default_rng(0)
    for offset, out, back in zip(rng.normal(0, 50, 100), *rng.random((2, 100)), strict=True):
        there = T + out + offset
        measured, within = ahead(T, there, T + out + back)
        assert abs(measured - offset) <= within + 1e-6


BROKEN = [
    "[" * 100_000,
    '{"name": 3, "start": 1, "seconds": 1}',
    f'{{"name": "a", "start": {T}, "seconds": "x"}}',
    f'{{"name": "a", "start": 1e400, "seconds": {T}}}',
    '{"name": "a", "start": true, "seconds": 1}',
    '{"counter": "a", "at": null, "value": 1}',
    f'{{"counter": "a", "at": {T}, "value": NaN}}',
    f'{{"mark": {{}}, "at": {T}}}',
    '{"clock": "a", "ahead": [], "within": 1}',
    "",
    "\x00\x01",
]


def test_a_strangers_folder_ends_in_a_message_or_in_what_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"timeline\.jsonl not found"):
        join(tmp_path)
    good = f'{{"name": "step", "step": 1, "start": {T}, "end": {T + 1}, "seconds": 1}}\n'
    (tmp_path / "timeline.jsonl").write_text("\n".join([*BROKEN, good]))
    (tmp_path / "logs").mkdir()
    for name in ("driver", "actor-rank0"):
        (tmp_path / "logs" / f"{name}.spans.jsonl").write_text("\n".join(BROKEN))
    os.mkfifo(tmp_path / "logs" / "pipe.spans.jsonl")
    found = join(tmp_path)
    assert found.steps()[1].start == T
    assert any("not a regular file" in line for line in found.missing)
    assert any("damaged line" in line for line in found.missing)
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "t")]) == 0
    assert "1 spans of 2 processes" in capsys.readouterr().out
    for steps, why in (("9", r"finished steps: 1 to 1"), ("a", "expected a number or a range")):
        assert main(["timeline", str(tmp_path), "--steps", steps]) == 2
        assert why in capsys.readouterr().err
