"""The HTML pages of `hybridflow watch`. URLs are relative, so that following a link keeps the
access token in the URL."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hybridflow.errors import HybridFlowError
from hybridflow.observe.report import Group, drawn_groups, overview, process_groups
from hybridflow.observe.run_folder import RunFolder
from hybridflow.observe.templates import fill
from hybridflow.observe.watch.alarms import alarms
from hybridflow.observe.watch.answer_pages import AnswerPages
from hybridflow.observe.watch.index import SampleIndex
from hybridflow.observe.watch.live_run import LiveRun
from hybridflow.observe.watch.overlay import both_names, compared
from hybridflow.observe.watch.sample_pages import NotFound, Parts, SamplePages

_SECTIONS = ("alarms", "tiles", "changes", "charts", "times", "notices", "settings")
_PICTURES_S = 30.0  # pictures of processes read many files, so they are drawn again this seldom


@dataclass(frozen=True)
class Page:
    """A response to a browser. `nonce` is the nonce of the page's script."""

    status: int
    kind: str
    text: str
    nonce: str = ""


@dataclass(frozen=True)
class Watched:
    """A run folder, and the index of its samples."""

    live: LiveRun
    index: SampleIndex

    @classmethod
    def of(cls, path: Path) -> Watched:
        """Start watching a run folder. Its samples are indexed by `index.refresh`."""
        return cls(LiveRun(path), SampleIndex(path))


class Pages:
    """Builds the pages about one run.

    Args:
        other: a run to compare with.
    """

    def __init__(self, watched: Watched, other: Watched | None = None) -> None:
        self.watched = watched
        self.other = other
        self.failure = ""  # why the folder could not be read lately
        self._samples = SamplePages(watched.live, watched.index)
        self._sections: dict[str, tuple[int, str]] = {}  # version of the last change, HTML
        self._drawn = 0  # version of the run in `_sections`
        self._pictures: tuple[float, list[Group]] | None = None
        self._lock = threading.Lock()

    @property
    def live(self) -> LiveRun:
        """The run's current contents."""
        return self.watched.live

    def page(self, name: str, fields: Mapping[str, str]) -> Page:
        """Return the page with this name (empty for the front page) for the query fields of its
        address."""
        if name == "live":
            return Page(200, "application/json", json.dumps(self._live(fields)))
        try:
            body, title, parts = self._parts(name, fields)
            return self._framed(200, name, title, body, **parts)
        except NotFound as error:
            message = str(error)
        except HybridFlowError as error:
            message = f"The dump cannot be read: {error}"
        return self._framed(404, name, "Not found", "watch_missing", message=message)

    def _parts(self, name: str, fields: Mapping[str, str]) -> Parts:
        if name == "":
            return "watch_run", "Run", {"sections": self._all_sections()}
        if self.other is not None:
            run = self.live.run
            other = self.other.live.run
            if name == "compare":
                return "watch_compare", "Compare", compared(run, other)
            if name == "answers":
                answers = AnswerPages(self.watched.index, self.other.index)
                return answers.parts(both_names(run, other), fields)
        return self._samples.parts(name, fields)

    def _framed(self, status: int, here: str, title: str, body: str, **parts: Any) -> Page:
        nonce = secrets.token_urlsafe(16)
        links = [("./", "Run"), ("rollouts", "Samples")]
        if self.other is not None:
            links += [("compare", "Compare"), ("answers", "Answers of both")]
        run = self.live.run
        about = {
            "name": run.name,
            "status": _status(run),
            "version": self.live.version,
            "here": here or "./",
            "title": title,
            "links": links,
            "nonce": nonce,
            "body": body,
        }
        return Page(status, "text/html", fill("watch", **parts, **about), nonce)

    def _live(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """Return the changes since the version that the browser shows."""
        given = fields.get("after", "")
        after = int(given) if given.isdecimal() else 0
        sections: dict[str, str] = {}
        self.live.poll()  # not only every half second
        page = fields.get("page")
        version = self.live.version
        if page == "./":
            with self._lock:
                version = self._draw()
                for name, (changed, html) in self._sections.items():
                    if changed > after or after > version:
                        sections[name] = html
        indexed = self._samples.indexed()
        if page == "rollouts":
            sections["indexed"] = str(Markup.escape(indexed))
        return {
            "version": version,
            "status": _status(self.live.run),
            "note": self.failure or f"live, {indexed}",
            "sections": sections,
        }

    def _all_sections(self) -> list[tuple[str, Markup]]:
        with self._lock:
            self._draw()
            return [(name, Markup(html)) for name, (_, html) in self._sections.items()]

    def _draw(self) -> int:
        """Render the sections again if the run has changed. Returns the run's version."""
        version = self.live.version
        if version == self._drawn:
            return version
        run = self.live.run
        parts = overview(run)
        parts |= {
            "alarms": alarms(run),
            "groups": [*drawn_groups(run), *self._process_groups(run)],
            "config_text": run.config_text,
            "config_title": "",
            "environment": [],
        }
        for name in _SECTIONS:
            html = fill(name, **parts)
            if self._sections.get(name, (0, None))[1] != html:
                self._sections[name] = (version, html)
        self._drawn = version
        return version

    def _process_groups(self, run: RunFolder) -> list[Group]:
        now = time.monotonic()
        if self._pictures is None or now > self._pictures[0] + _PICTURES_S:
            self._pictures = (now, process_groups(run))
        return self._pictures[1]


def _status(run: RunFolder) -> str:
    status = run.summary.get("status")
    if isinstance(status, str) and status:
        return status[:200]
    text = f"step {run.last_step('train')}"
    total = run.setting("trainer.total_steps")
    if total:
        text += f" of {total}"
    if run.summary:
        text += ", finished"
    return text
