"""Pictures of the live page (`hybridflow watch`), taken of a finished run in headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from website.nav import DOCS, ROOT

RUN = ROOT / "runs" / "tiny-moe-grpo"  # where `make demo` writes
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60
_LOAD_MS = 4000  # for the scripts of a page


@dataclass(frozen=True)
class Picture:
    """A page in a window.

    Attributes:
        page: below the printed address.
        size: of the window in pixels.
        is_dark: whether the system prefers dark colours.
    """

    page: str
    size: tuple[int, int]
    is_dark: bool = False


PICTURES = {
    "watch-run.png": Picture("", (1280, 900)),
    "watch-samples.png": Picture("rollouts?order=best+score", (1280, 800), is_dark=True),
}


def browser() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def take(run: Path, folder: Path, program: str) -> list[Path]:
    """Take all pictures of a run. Returns their files."""
    command = [sys.executable, "-m", "hybridflow.cli.main", "watch", str(run), "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch,
    ):
        try:
            assert watch.stdout is not None
            address = watch.stdout.readline().strip()
            written = []
            for name, picture in PICTURES.items():
                written.append(folder / name)
                width, height = picture.size
                options = [
                    "--headless",
                    "--no-sandbox",
                    "--hide-scrollbars",
                    f"--user-data-dir={profile}",
                    f"--window-size={width},{height}",
                    f"--virtual-time-budget={_LOAD_MS}",
                    f"--screenshot={written[-1]}",
                ]
                if picture.is_dark:
                    options.append("--blink-settings=preferredColorScheme=0")
                subprocess.run(
                    [program, *options, address + picture.page],
                    check=True,
                    capture_output=True,
                    timeout=_TIMEOUT_S,
                )
            return written
        finally:
            watch.terminate()


def retake() -> str:
    """Take the pictures of the demo's run, if it and Chromium are here. Returns what was done."""
    program = browser()
    if program is None or not (RUN / "summary.json").is_file():
        missing = "Chromium" if program is None else f"a finished run in {RUN.relative_to(ROOT)}"
        return f"kept the pictures of hybridflow watch: {missing} is missing"
    written = take(RUN, DOCS / "figures", program)
    return f"took {len(written)} pictures of {RUN.relative_to(ROOT)}"
