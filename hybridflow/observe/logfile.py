"""Python logging to the run folder: all records from HybridFlow, and warnings from libraries. The
terminal shows only warnings."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hybridflow.observe.printable import printable

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = "hybridflow_handler"


def setup_logging(run_dir: str | Path, level: int | str = logging.INFO) -> Path:
    """Append log records to `RUN_DIR/hybridflow.log`, and also print warnings to stderr. Returns
    the file's path.

    `level` applies to HybridFlow's own loggers; other libraries log warnings and above. A second
    call replaces the handlers of the first.
    """
    path = Path(run_dir) / "hybridflow.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    stop_logging()
    formatter = logging.Formatter(_FORMAT)
    formatter.converter = time.gmtime  # UTC on every node, regardless of its time zone
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
    """A formatter for terminals that escapes control characters from untrusted text."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record and escape control characters."""
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file that reports a write error (e.g. a full disk) only once. By default, logging would
    print a traceback for every record."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report a write error. Called by `emit` while handling the exception."""
        if self.level <= logging.CRITICAL:
            self.setLevel(logging.CRITICAL + 1)
            with suppress(OSError):  # stderr may be on the same disk
                print(
                    f"hybridflow: could not write {self.baseFilename}: {sys.exc_info()[1]}",
                    file=sys.stderr,
                )


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """A handler for the current `sys.stderr`, which a live progress bar replaces temporarily."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Look up stderr and emit the record."""
        self.stream = sys.stderr
        super().emit(record)
