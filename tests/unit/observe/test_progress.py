"""Progress in a file and in a terminal."""

from __future__ import annotations

import io
import re

import pytest

from hybridflow.observe.progress import Progress, State, duration, number


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_plain_line_a_step_with_phases_and_eta() -> None:
    out = io.StringIO()
    with Progress(3, "GRPO", stream=out) as progress:
        progress.update(
            1,
            {"reward": 0.61, "kl": 1.2e-5},
            {"timing_s/gen": 4.2, "timing_s/adv": 0.01, "timing_s/step": 60.0},
        )
        progress.message("checkpoint written")
        progress.update(3, {"reward": 0.7}, {"gen": 4.0})
    first, message, last = plain(out)
    assert re.fullmatch(
        r"GRPO 1/3  reward 0\.610  kl 1\.20e-05 \| 60\.0 s: gen 4\.2 \| ETA 2 min 0\d s", first
    )
    assert message == "checkpoint written"
    assert last == "GRPO 3/3  reward 0.700 | 4.0 s: gen 4.0"


def test_sft_lines_are_throttled_but_the_first_and_last_appear() -> None:
    out = io.StringIO()
    with Progress(50, "SFT", throttle_s=60.0, stream=out) as progress:
        for step in range(1, 51):
            progress.update(step, {"loss": 1.0 / step})
    assert [line.split()[1] for line in plain(out)] == ["1/50", "50/50"]


def test_a_resumed_run_predicts_from_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("hybridflow.observe.progress.time.monotonic", lambda: now[0])
    state = State(100, "GRPO", initial=90)
    assert state.eta_s() is None
    for step in (91, 92, 93):
        now[0] += 10.0
        state.advance(step, {}, {"step": 10.0})
    assert state.eta_s() == pytest.approx(70.0)
    assert state.eta_text() == "ETA 1 min 10 s"


def test_stages_tell_how_long_they_took_and_how_they_ended() -> None:
    out = io.StringIO()
    progress = Progress(0, "Prepare", stream=out)
    with progress.stage("start engines"):
        pass
    with pytest.raises(ValueError, match="bad"), progress.stage("start workers"):
        raise ValueError("bad")
    with pytest.raises(KeyboardInterrupt), progress.stage("validate"):
        raise KeyboardInterrupt
    progress.close()
    assert plain(out) == [
        "start engines ...",
        "start engines: 0.0 s",
        "start workers ...",
        "start workers: failed after 0.0 s",
        "validate ...",
        "validate: stopped after 0.0 s",
    ]


def test_a_stream_that_is_not_unicode_gets_its_lines_all_the_same() -> None:
    raw = io.BytesIO()
    with Progress(1, "GRPO", stream=io.TextIOWrapper(raw, encoding="ascii")) as progress:
        progress.message("accuracy 12 % → 64 %")
        assert raw.getvalue() == b"accuracy 12 % ? 64 %\n"


def test_disabled_progress_is_silent() -> None:
    out = Terminal()
    with Progress(1, "GRPO", enabled=False, stream=out) as progress, progress.stage("x"):
        progress.update(1, {"reward": 1.0}, {"step": 1.0})
        progress.message("y")
    assert out.getvalue() == ""


def test_a_terminal_shows_bar_stage_and_messages_and_gets_its_cursor_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress(4, "GRPO", stream=out) as progress:
        with progress.stage("start engines"):
            pass
        progress.update(1, {"reward": 0.25}, {"gen": 2.0, "step": 3.0})
        progress.message("a [bold]message[/bold] :x:")
        with progress.stage("validate"):
            raise KeyboardInterrupt
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for piece in (
        "start engines",
        "1/4",
        "reward 0.250",
        "step 3.0 s: gen 2.0",
        "ETA",
        "a [bold]message[/bold] :x:",
        "stopped after",
    ):
        assert piece in text
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with Progress(1, "GRPO", stream=out) as progress:
        progress.update(1, {"reward": 1.0})
    assert plain(out) == ["GRPO 1/1  reward 1.000"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.0, 0.61234, 1.2e-5, 7, "x", float("nan"))] == [
        "0.000",
        "0.612",
        "1.20e-05",
        "7",
        "x",
        "nan",
    ]
