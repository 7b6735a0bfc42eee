"""Progress display: a live bar in a terminal, plain lines in a file or a pipe.

    with Progress(total=60, title="GRPO") as progress:
        with progress.stage("start engines"):
            ...
        progress.update(1, {"reward": 0.31, "accuracy": 0.29}, {"gen": 4.1, "update_actor": 2.2,
        "step": 7.0})

Example of a plain line:

    GRPO 12/60  reward 0.610  accuracy 0.550 | 8.1 s: gen 4.2, update_actor 2.1 | ETA 6 min 29 s
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from hybridflow.observe.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_ETA_WINDOW = 20  # number of recent steps used for the time estimate
_PHASES_SHOWN = 4
_REFRESH_PER_S = 4


class Progress:
    """A progress bar, and the stages before and after it. The bar appears with the first `update`;
    before that only stages and messages are shown.

    Args:
        total: number of steps; 0 if this part of the job has only stages.
        title: name shown for the steps, for example "GRPO".
        initial: the step from which a resumed run continues.
        throttle_s: minimum number of seconds between plain lines, except the first and the last;
            useful for short steps, as in SFT.
        enabled: False shows nothing.
        stream: output stream; None for stdout.
    """

    def __init__(
        self,
        total: int,
        title: str,
        *,
        initial: int = 0,
        throttle_s: float = 0.0,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._state = State(total, title, initial)
        out = stream if stream is not None else sys.stdout
        self._display: _Display
        if not enabled:
            self._display = _Display()
        elif out.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}:
            self._display = _Live(out, self._state)
        else:
            self._display = _Plain(out, self._state, throttle_s)
        # Restore the cursor even if the run exits without leaving the `with` block.
        atexit.register(self.close)

    def update(
        self,
        step: int,
        fields: Mapping[str, float | str],
        phases: Mapping[str, float] | None = None,
    ) -> None:
        """Mark `step` as finished, and show its metrics and the time spent in each phase (any
        `timing_s/` prefix is stripped)."""
        self._state.advance(step, fields, phases or {})
        self._display.updated()

    def message(self, text: str) -> None:
        """Print a permanent line above the bar."""
        self._display.line(printable(text))

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Show a stage of the job: a spinner with elapsed seconds, and a permanent line when it
        ends."""
        start = time.monotonic()
        self._state.stages.append((title, start))
        self._display.stage_began(title)
        outcome = ""
        try:
            yield
        except BaseException as error:
            outcome = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            raise
        finally:
            self._state.stages.remove((title, start))
            self._display.stage_ended(title, time.monotonic() - start, outcome)

    def close(self) -> None:
        """Restore the terminal. The bar remains visible in its final state."""
        self._display.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class State:
    """The displayed state: finished steps, the last step's metrics, running stages and remaining
    time."""

    def __init__(self, total: int, title: str, initial: int = 0) -> None:
        self.total = total
        self.title = title
        self.step = initial
        self.fields: dict[str, float | str] = {}
        self.phases: dict[str, float] = {}
        self.stages: list[tuple[str, float]] = []
        self.started = False
        self._marks: deque[tuple[float, int]] = deque(maxlen=_ETA_WINDOW + 1)
        self._step_seconds: float | None = None

    def advance(
        self, step: int, fields: Mapping[str, float | str], phases: Mapping[str, float]
    ) -> None:
        """Store the metrics of a finished step."""
        self.phases = {name.removeprefix("timing_s/"): seconds for name, seconds in phases.items()}
        seconds = self.phases.pop("step", None) or sum(self.phases.values())
        self._step_seconds = seconds or None
        if not self._marks and self._step_seconds is not None and step > self.step:
            # so that the first step already gives an estimate
            self._marks.append((time.monotonic() - self._step_seconds, step - 1))
        self._marks.append((time.monotonic(), step))
        self.started = True
        self.step = step
        self.fields = dict(fields)

    def eta_s(self) -> float | None:
        """Estimate the number of remaining seconds from the mean duration of recent steps; None if
        there is no data."""
        if len(self._marks) < 2:
            return None
        first, low = self._marks[0]
        last, high = self._marks[-1]
        if high <= low:
            return None
        each = (last - first) / (high - low)
        return max(0.0, each * (self.total - self.step))

    def fields_text(self) -> str:
        """Format the metrics as `reward 0.610  accuracy 0.550`."""
        return "  ".join(f"{name} {number(value)}" for name, value in self.fields.items())

    def phases_text(self) -> str:
        """Format the duration of the step and of its longest phases as `8.1 s: gen 4.2,
        update_actor 2.1`."""
        if self._step_seconds is None:
            return ""
        longest = sorted(self.phases.items(), key=lambda item: -item[1])[:_PHASES_SHOWN]
        detail = ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest if seconds >= 0.05)
        text = f"{self._step_seconds:.1f} s"
        return f"{text}: {detail}" if detail else text

    def eta_text(self) -> str:
        """Format the remaining time as `ETA 6 min 29 s`; "" at the end or if there is no
        estimate."""
        left = self.eta_s()
        return f"ETA {duration(left)}" if left is not None and self.step < self.total else ""


def number(value: float | str) -> str:
    """Format a number with three decimals, or in scientific notation if three decimals are not
    enough."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1e5 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """Format a duration as `8.1 s`, `6 min 29 s` or `2 h 05 min`."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds) // 60
    return (
        f"{minutes} min {round(seconds) % 60:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


class _Display:
    """Base class of the displays. It shows nothing."""

    def updated(self) -> None:
        """Called when the state has changed."""

    def line(self, text: str) -> None:
        """Print a line."""

    def stage_began(self, title: str) -> None:
        """Called at the start of a stage."""

    def stage_ended(self, title: str, seconds: float, outcome: str) -> None:
        """Called at the end of a stage; `outcome` is empty on success."""

    def close(self) -> None:
        """Release the terminal."""


class _Plain(_Display):
    """A display with one line per event."""

    def __init__(self, out: TextIO, state: State, throttle_s: float) -> None:
        self._out = out
        self._state = state
        self._throttle_s = throttle_s
        self._printed: float | None = None

    def updated(self) -> None:
        state = self._state
        now = time.monotonic()
        if (
            self._printed is not None
            and now - self._printed < self._throttle_s
            and state.step < state.total
        ):
            return
        self._printed = now
        head = f"{state.title} {state.step}/{state.total}"
        fields = state.fields_text()
        if fields:
            head += f"  {fields}"
        parts = (head, state.phases_text(), state.eta_text())
        self.line(" | ".join(filter(None, parts)))

    def line(self, text: str) -> None:
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        printable = text.encode(encoding, errors="replace").decode(encoding)
        print(printable, file=self._out, flush=True)

    def stage_began(self, title: str) -> None:
        self.line(f"{title} ...")

    def stage_ended(self, title: str, seconds: float, outcome: str) -> None:
        self.line(f"{title}: {outcome + ' after ' if outcome else ''}{duration(seconds)}")


class _Live(_Display):
    """A live terminal region, drawn with the library rich: running stages with spinners, the bar,
    and the last step's metrics."""

    def __init__(self, out: TextIO, state: State) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._state = state
        self._console: Console = Console(file=out, highlight=False, emoji=False)
        self._unicode = "utf" in (self._console.encoding or "").lower()
        # shared by all stages, since each spinner starts its own animation
        self._spinner = Spinner("dots" if self._unicode else "line")
        self._new_live = lambda: Live(
            self, console=self._console, refresh_per_second=_REFRESH_PER_S, transient=False
        )
        self._live: Any = None
        self._closed = False

    def updated(self) -> None:
        self._show()
        self._live.refresh()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def stage_began(self, title: str) -> None:
        self._show()

    def stage_ended(self, title: str, seconds: float, outcome: str) -> None:
        from rich.text import Text

        good, bad = ("✓", "✗") if self._unicode else ("+", "x")
        mark = (bad, "bold red") if outcome else (good, "bold green")
        took = f"{outcome + ' after ' if outcome else ''}{duration(seconds)}"
        self._console.print(Text.assemble(mark, " ", title, "  ", (took, "dim")))
        if not self._state.stages and not self._state.started:
            self._hide()  # nothing is left to show, so release the terminal for other output

    def close(self) -> None:
        self._hide()

    def _show(self) -> None:
        if self._live is None:
            self._live = self._new_live()
            self._live.start(refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            live = self._live
            self._live = None
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state = self._state
        for title, start in list(state.stages):
            row = Table.grid(padding=(0, 1))
            row.add_row(
                self._spinner, Text(title), Text(f"{time.monotonic() - start:.0f} s", style="dim")
            )
            yield row
        if not state.started:
            return
        bar = Table.grid(padding=(0, 1))
        width = max(10, min(40, options.max_width - len(state.title) - 40))
        count = Text(f"{state.step}/{state.total}")
        drawn = ProgressBar(
            max(1, state.total),
            state.step,
            width=width,
            complete_style="cyan",
            finished_style="green",
        )
        bar.add_row(Text(state.title, style="bold"), drawn, count, state.eta_text())
        yield bar
        if text := state.fields_text():
            yield Text("  " + text, style="cyan")
        if text := state.phases_text():
            yield Text("  step " + text, style="dim", overflow="ellipsis", no_wrap=True)
