"""Export of a joined timeline as a Perfetto trace, which can be opened in ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.observe.joined_timeline import JoinedTimeline, Process, Span, lanes

_SEQUENCE = 1  # all packets come from one writer
_NS = 1_000_000_000


def write_trace(timeline: JoinedTimeline, path: Path) -> int:
    """Write the trace to a new file, and return the number of slices in it. Each process of the run
    becomes a process of the trace, with a track per thread (several if the thread's spans overlap
    without nesting), counter tracks, and an instant event for each mark. Timestamps are nanoseconds
    of Unix time.
    """
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    slices = 0
    with path.open("wb") as file:
        builder = StreamingTraceProtoBuilder(file)
        uuids = iter(range(1, 1 << 31))
        for number, process in enumerate(timeline.processes, 1):
            for fill in _packets(process, number, uuids):
                packet = builder.create_packet()
                packet.trusted_packet_sequence_id = _SEQUENCE
                fill(packet)
                slices += packet.track_event.type == packet.track_event.TYPE_SLICE_BEGIN
                builder.write_packet(packet)
    return slices


def _packets(process: Process, number: int, uuids: Iterator[int]) -> Iterator[Any]:
    """Yield a function for each packet. The function fills in the packet's fields."""
    parent = next(uuids)
    yield _described(parent, None, process.name, number)
    for thread, spans in process.threads.items():
        for lane, inside in enumerate(lanes(spans)):
            track = next(uuids)
            yield _described(track, parent, thread if lane == 0 else f"{thread} ({lane + 1})")
            for at, span in _events(inside):
                if span is None:
                    yield _event(track, at, "TYPE_SLICE_END")
                else:
                    step = "" if span.step is None else f" {span.step}"
                    yield _event(track, at, "TYPE_SLICE_BEGIN", name=span.name + step)
    for name, values in process.counters.items():
        track = next(uuids)
        yield _counter(track, parent, name)
        for time, value in values:
            yield _event(track, _ns(time), "TYPE_COUNTER", double_counter_value=value)
    if process.marks:
        track = next(uuids)
        yield _described(track, parent, "events")
        for time, text in process.marks:
            yield _event(track, _ns(time), "TYPE_INSTANT", name=text)


def _events(spans: list[Span]) -> Iterator[tuple[int, Span | None]]:
    """Yield (nanoseconds, span) for the start and (nanoseconds, None) for the end of each span, in
    chronological order. An end always closes the innermost open span. `spans` is a lane, sorted by
    start.
    """
    is_open: list[int] = []
    for span in spans:
        start = _ns(span.start)
        while is_open and is_open[-1] <= start:
            yield is_open.pop(), None
        # rounding must not make a span end after the span around it
        end = max(start, _ns(span.end))
        is_open.append(min(end, is_open[-1]) if is_open else end)
        yield start, span
    while is_open:
        yield is_open.pop(), None


def _described(uuid: int, parent: int | None, name: str, pid: int | None = None) -> Any:
    def fill(packet: Any) -> None:
        packet.track_descriptor.uuid = uuid
        if parent is not None:
            packet.track_descriptor.parent_uuid = parent
            packet.track_descriptor.name = name
        if pid is not None:
            packet.track_descriptor.process.pid = pid
            packet.track_descriptor.process.process_name = name

    return fill


def _counter(uuid: int, parent: int, name: str) -> Any:
    def fill(packet: Any) -> None:
        _described(uuid, parent, name)(packet)
        packet.track_descriptor.counter.SetInParent()

    return fill


def _event(track: int, at: int, kind: str, **fields: Any) -> Any:
    def fill(packet: Any) -> None:
        packet.timestamp = at
        event = packet.track_event
        event.track_uuid = track
        event.type = event.Type.Value(kind)
        for name, value in fields.items():
            setattr(event, name, value)

    return fill


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
