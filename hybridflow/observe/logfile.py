"""Python logging into the run folder: all records of HybridFlow and the warnings of libraries. The
terminal shows warnings only."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TextIO

from hybridflow.config.outside_text import printable

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = "hybridflow_handler"


def setup_logging(run_dir: str | Path, level: int | str = logging.INFO) -> Path:
    """Send logging to `RUN_DIR/hybridflow.log` (appended) and warnings to stderr; returns the file.

    `level` holds for HybridFlow's own loggers; other libraries log warnings and above. A second
    call replaces the first one's handlers.
    """
    path = Path(run_dir) / "hybridflow.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    stop_logging()
    formatter = logging.Formatter(_FORMAT)
    formatter.converter = time.gmtime  # the clock of every node, whatever its time zone
    formatter.default_msec_format = "%s.%03dZ"
    file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    terminal = _CurrentStderr()
    terminal.setLevel(logging.WARNING)
    for handler, shape in (
        (file, formatter),
        (terminal, _Printable("%(levelname)s %(name)s: %(message)s")),
    ):
        handler.setFormatter(shape)
        handler.set_name(_OURS)
        logging.getLogger().addHandler(handler)
    logging.getLogger("hybridflow").setLevel(level)
    logging.captureWarnings(True)
    return path


def stop_logging() -> None:
    """Remove the handlers of `setup_logging` and close the file."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.get_name() == _OURS]:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)


class _Printable(logging.Formatter):
    """Records for a terminal, which text from a file must not steer."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with escapes in place of control characters."""
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """Says once that it cannot be written, as on a full disk, where logging would print a traceback
    for each record."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by `emit` while it handles the exception."""
        if self.level <= logging.CRITICAL:
            self.setLevel(logging.CRITICAL + 1)
            print(
                f"hybridflow: {self.baseFilename} cannot be written: {sys.exc_info()[1]}",
                file=sys.stderr,
            )


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now: a live progress bar replaces it while it is on
    screen."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Look stderr up before each record."""
        self.stream = sys.stderr
        super().emit(record)
