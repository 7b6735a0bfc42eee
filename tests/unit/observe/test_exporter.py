"""The exporter of a running job, read by Prometheus' own parser."""

from __future__ import annotations

import http.client
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError
from hybridflow.observe.exporter import Exporter, family_of
from hybridflow.observe.tracker import Tracker
from tests.arch.files import ROOT
from tests.unit.observe.tracker_folders import with_libraries

PARSE = """
import json, sys
from prometheus_client.parser import text_string_to_metric_families
print(json.dumps([
    [family.name, family.type, family.documentation, sample.labels, sample.value]
    for family in text_string_to_metric_families(sys.stdin.read()) for sample in family.samples
]))
"""


def asked(port: int, path: str = "/metrics", host: str = "localhost") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_prometheus_reads_the_latest_record_of_each_phase(tmp_path: Path) -> None:
    exporter = Exporter('a "run"', 0)
    with Tracker(tmp_path, ("jsonl",), exporter=exporter) as tracker:
        tracker.log(1, {"critic/score/mean": 0.25})
        odd = {"perf/memory": 1.0, "perf_memory": 2.0, "val/a\\b/pass@2": math.nan, "x": math.inf}
        tracker.log(2, {"critic/score/mean": 0.5, **odd})
        tracker.log(2, {"val/score": 0.125}, "val")
        tracker.close_files()  # the report is still to be written
        status, text = asked(exporter.port)
        tracker.truncate_after("train", 1)
        after = asked(exporter.port)[1]
    assert status == 200
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=text,
        env=with_libraries(),
        capture_output=True,
        text=True,
        check=True,
    )
    samples = json.loads(done.stdout)
    by_metric = {labels.get("metric", name): value for name, _, _, labels, value in samples}
    assert by_metric["critic/score/mean"] == 0.5 and by_metric["val/score"] == 0.125
    assert (by_metric["perf/memory"], by_metric["perf_memory"]) == (1.0, 2.0)  # one family
    assert math.isnan(by_metric["val/a\\b/pass@2"]) and by_metric["x"] == math.inf
    assert {labels["run"] for *_, labels, _ in samples} == {'a "run"'}
    steps = {row[3]["phase"]: row[4] for row in samples if row[0] == "hybridflow_step"}
    assert steps == {"train": 2.0, "val": 2.0}
    [score] = [row for row in samples if row[3].get("metric") == "critic/score/mean"]
    assert score[1] == "gauge" and score[2].endswith("(score)")
    assert "critic" not in after and "val_score" in after
    with pytest.raises(ConnectionRefusedError):
        asked(exporter.port)


def test_it_answers_this_machine_alone() -> None:
    exporter = Exporter("run", 0)
    assert asked(exporter.port, host="evil.example")[0] == 403
    assert asked(exporter.port, host=f"127.0.0.1:{exporter.port}")[0] == 200
    assert asked(exporter.port, "/config")[0] == 404
    with pytest.raises(ConfigError, match=rf"trainer\.prometheus_port={exporter.port}.*null"):
        Exporter("second", exporter.port)
    exporter.close()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    from hybridflow.observe.metric_names import LINES, line_of

    dashboard = json.loads((ROOT / "launch" / "grafana" / "hybridflow.json").read_text())
    known = {family_of(line.name) for line in LINES}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 10
    for query in queries:
        name = query.partition("{")[0]
        metrics = [part for part in query.split('"') if "/" in part]
        assert name in known or name == "hybridflow_step" or (metrics and line_of(metrics[0])), (
            query
        )
