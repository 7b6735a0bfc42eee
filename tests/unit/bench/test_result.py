"""Files of results: written ones are read back, truncated and foreign ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from hybridflow.bench import result as results
from hybridflow.bench.result import SCHEMA, Metric, NotRun, Reference, merge, read, write
from hybridflow.errors import DataError, StorageError
from tests.unit.bench.samples import simulated


def whole() -> results.Result:
    """A result with every kind of entry."""
    rate = Metric(
        "copy",
        "copy/rate",
        "GB/s",
        "higher",
        (2.0, 3.0, 4.0),
        limit=Reference("sheet", (6.0, 6.0, 6.0)),
        peer=Reference("peer", (1.5, 1.5, 1.5)),
        node="n1",
        bound=0.1,
    )
    run = simulated(1)
    finding = {"node": "n1", "name": "disk", "level": "warning", "what": "3 GiB free"}
    return replace(
        run,
        metrics=(*run.metrics, rate),
        not_run=(NotRun("kernels", "needs a GPU"),),
        findings=(finding,),
    )


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "r.json", whole())
    assert read(tmp_path / "deep" / "r.json") == whole()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_the_file_is_of_the_published_schema_and_says_what_follows_from_the_rounds(
    tmp_path: Path,
) -> None:
    write(tmp_path / "r.json", whole())
    found = json.loads((tmp_path / "r.json").read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    rate = found["metrics"][-1]
    assert (rate["value"], rate["median"], rate["share"], rate["ratio"]) == (3.0, 3.0, 0.5, 2.0)
    assert rate["spread"] == pytest.approx(1 / 3) and rate["limit"]["value"] == 6.0


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    write(tmp_path / "r.json", whole())
    text = (tmp_path / "r.json").read_text()
    for length in range(0, len(text) - 2, 997):
        (tmp_path / "cut.json").write_text(text[:length])
        with pytest.raises(DataError, match="truncated"):
            read(tmp_path / "cut.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}', "not a benchmark result"),
        ("3", "not a benchmark result"),
        ('[{"b": 1}]', "not a benchmark result"),
        ('[{"metric": "m", "value": "x", "unit": "s"}]', "not a benchmark result"),
        ('{"format": "hybridflow-bench/9"}', "update hybridflow"),
        ('{"format": "hybridflow-bench/1"}', "is a required property"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(DataError, match=said):
        read(tmp_path / "f.json")


def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    write(tmp_path / "r.json", whole())
    found = json.loads((tmp_path / "r.json").read_text())
    found["metrics"][2]["rounds"] = ["fast"]
    (tmp_path / "r.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match=r"metrics\.2\.rounds\.0: 'fast'"):
        read(tmp_path / "r.json")


def test_no_file_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "absent.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "b.json")


def test_a_full_disk_is_said_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "replace", full)
    with pytest.raises(StorageError, match=r"r\.json: No space left on device; free space"):
        write(tmp_path / "r.json", whole())
    assert list(tmp_path.iterdir()) == []


def test_results_of_nodes_become_one() -> None:
    one = simulated(1, ("n1",))
    other = simulated(2, ("n2",))
    both = merge([one, other])
    assert both.nodes == ("n1", "n2") and both.fingerprint["placement"]["nodes"] == ["n1", "n2"]
    with pytest.raises(DataError, match="different suites"):
        merge([one, replace(other, suite="full")])
