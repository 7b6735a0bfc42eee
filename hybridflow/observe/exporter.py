"""Export of a running job's latest metrics to Prometheus, at `http://127.0.0.1:PORT/metrics` if
`trainer.prometheus_port` is set. For example, `critic/score/mean` becomes the gauge
`hybridflow_critic_score_mean{run,phase,metric}`. The server is read-only, listens only on loopback,
and serves nothing but numbers.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.observe.metric_names import line_of
from hybridflow.observe.trackers.base import Phase

_HOST = "127.0.0.1"
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATIENCE_S = 10.0
Sample = tuple[str, str, Mapping[str, str], float]  # family, help, labels, value


class Exporter:
    """A `Sink` that serves the last record of each phase.

    Args:
        run: the run's name, used as a label of every sample.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, run: str, port: int) -> None:
        self._run = run
        self._latest: dict[Phase, tuple[int, float, dict[str, float]]] = {}
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S  # of a connection that sends nothing

            def do_GET(self) -> None:
                """Answer /metrics."""
                # a page in a browser must not read it through a name that points here
                if not _LOCAL.fullmatch(self.headers.get("Host", "")):
                    return self.send_error(403)
                if self.path.partition("?")[0] != "/metrics":
                    return self.send_error(404, "see /metrics")
                text = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"trainer.prometheus_port={port}: {_HOST}:{port} cannot be used "
                f"({error.strerror}); choose another port, or null"
            ) from error
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(
            target=self._server.serve_forever, name="prometheus exporter", daemon=True
        ).start()

    def log(self, step: int, phase: Phase, wall_time: float, metrics: Mapping[str, float]) -> None:
        """Replace the phase's previous record with this one."""
        self._latest = {**self._latest, phase: (step, wall_time, dict(metrics))}

    def truncate_after(self, phase: Phase, step: int) -> None:
        """Drop the phase's record if it is from a later step."""
        if phase in self._latest and self._latest[phase][0] > step:
            self._latest = {name: one for name, one in self._latest.items() if name != phase}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """Return the metrics in Prometheus' text exposition format (0.0.4)."""
        samples: list[Sample] = []
        for phase, (step, wall_time, metrics) in self._latest.items():
            labels = {"run": self._run, "phase": phase}
            samples.append(("hybridflow_step", "latest step (step)", labels, float(step)))
            about = "time at which the latest step was recorded (s since 1970)"
            samples.append(("hybridflow_recorded_seconds", about, labels, wall_time))
            for name, value in metrics.items():
                of_metric = {**labels, "metric": name}
                samples.append((family_of(name), _help(name), of_metric, value))
        return exposition(samples)


def exposition(samples: Iterable[Sample]) -> str:
    """Return gauges in Prometheus' text exposition format, grouped by family."""
    families: dict[str, list[str]] = {}
    for family, about, labels, value in samples:
        rows = families.setdefault(family, [f"# HELP {family} {about}", f"# TYPE {family} gauge"])
        pairs = [f'{name}="{_escaped(text)}"' for name, text in labels.items()]
        shown = "NaN" if math.isnan(value) else repr(value).replace("inf", "Inf")
        rows.append(f"{family}{{{','.join(pairs)}}} {shown}")
    return "".join(f"{row}\n" for row in chain.from_iterable(families.values()))


def family_of(name: str) -> str:
    """Return the name of the gauge for a metric. Several metrics may share a gauge; their label
    `metric` distinguishes them.
    """
    return "hybridflow_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _help(name: str) -> str:
    line = line_of(name)
    text = f"{line.meaning} ({line.unit})" if line else name
    return text.replace("\\", "\\\\").replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
