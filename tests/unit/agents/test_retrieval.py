"""The tool `retrieval`: what is found, the index that is kept, and documents that cannot be
searched."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.agents.formats.base import Call
from hybridflow.agents.tools import retrieval
from hybridflow.agents.tools.base import Toolbox
from hybridflow.config.check import problems
from hybridflow.config.schema import AgentConfig, RolloutConfig, RunConfig
from hybridflow.errors import ConfigError

TEXTS = [
    "The heron stands in shallow water and waits for fish.",
    "Bees dance to tell other bees where flowers are.",
    "A fish breathes with gills; fish scales protect it.",
    "The lighthouse of Alexandria was more than 100 metres high.",
]


@pytest.fixture(autouse=True)
def _another_process() -> None:
    retrieval._index.cache_clear()


def opened(**options: Any) -> Toolbox:
    return Toolbox(AgentConfig(tools=("retrieval",), tool_options={"retrieval": options}))


def found(tools: Toolbox, query: str) -> str:
    return asyncio.run(tools.results([Call("retrieval", {"query": query})]))[0]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def table(path: Path, columns: dict[str, list[Any]]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def folder(path: Path, texts: dict[str, str]) -> str:
    for name, text in texts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_the_passages_that_fit_best_are_shown_in_order(kind: str, tmp_path: Path) -> None:
    if kind == "jsonl":
        documents = jsonl(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS])
    elif kind == "parquet":
        documents = table(tmp_path / "d.parquet", {"text": TEXTS, "other": [1, 2, 3, 4]})
    else:
        documents = folder(
            tmp_path / "d",
            {f"sub/{n}.md": text for n, text in enumerate(TEXTS)} | {"x.png": "bees"},
        )
    tools = opened(documents=documents, top_k=2)
    assert found(tools, "FISH?") == f"[1] {TEXTS[2]}\n\n[2] {TEXTS[0]}"
    assert found(tools, "100") == f"[1] {TEXTS[3]}"
    assert found(tools, "zebra") == found(tools, "") == found(tools, "?") == "nothing was found"
    function = tools.schemas()[0]["function"]
    assert (
        function["parameters"]["required"] == ["query"]
        and "Search the documents" in function["description"]
    )


def test_scores_are_those_of_the_formula(tmp_path: Path) -> None:
    """Okapi BM25 with Lucene's idf, k1 = 1.5 and b = 0.75."""
    words = [retrieval._words(text) for text in TEXTS]
    opened(documents=jsonl(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS]))
    kept = next((tmp_path / "d.jsonl.bm25").iterdir())
    ranked = bm25s.BM25.load(kept, allow_pickle=False)
    mean = sum(map(len, words)) / len(words)

    def score(word: str, row: list[str]) -> float:
        holding = sum(word in one for one in words)
        idf = math.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
        count = row.count(word)
        return idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(row) / mean))

    wanted = [sum(score(word, row) for word in ("fish", "the", "bees")) for row in words]
    assert np.asarray(ranked.get_scores(["fish", "the", "bees"])) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("故乡", "低头思故乡"),
        ("乡", "乡"),
        ("カタカナ", "これはカタカナです"),
        ("Qwen模型", "使用qwen模型的例子"),
    ],
)
def test_scripts_without_spaces_are_searched_by_pairs_of_characters(
    query: str, text: str, tmp_path: Path
) -> None:
    texts = ["低头思故乡", "乡", "これはカタカナです", "使用qwen模型的例子", "天气很好"]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    tools = opened(documents=str(path), top_k=1)
    assert found(tools, query) == f"[1] {text}"


def test_files_of_text_are_cut_into_passages(tmp_path: Path) -> None:
    paragraphs = [" ".join([word] * 12) for word in ("alpha", "beta", "gamma", "delta")]
    tools = opened(
        documents=folder(tmp_path / "d", {"a.txt": "\n\n".join(paragraphs)}),
        passage_characters=40,
        top_k=9,
    )
    shown = found(tools, "gamma").split("\n\n")
    assert len(shown) == 2 and all(len(passage) <= 44 and "gamma" in passage for passage in shown)
    parts = list(retrieval._parts("\n\n".join([*paragraphs, "x" * 100]), 40))
    assert all(0 < len(part) <= 40 for part in parts)
    assert "".join("".join(parts).split()) == "".join("".join([*paragraphs, "x" * 100]).split())


def test_a_long_row_is_shown_in_part(tmp_path: Path) -> None:
    documents = jsonl(tmp_path / "d.jsonl", [{"text": "word " * 1000}])
    assert (
        len(found(opened(documents=documents, passage_characters=50), "word")) == len("[1] ") + 50
    )


def test_the_index_is_kept_and_built_again_when_documents_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    index = bm25s.BM25.index
    monkeypatch.setattr(
        bm25s.BM25, "index", lambda *args, **more: (built.append(1), index(*args, **more))[1]
    )
    path = tmp_path / "d.jsonl"

    def again(rows: list[str], **options: Any) -> str:
        retrieval._index.cache_clear()
        return found(
            opened(documents=jsonl(path, [{"text": text} for text in rows]), top_k=1, **options),
            "fish bees",
        )

    assert again(TEXTS) == again(TEXTS) == f"[1] {TEXTS[1]}" and len(built) == 1
    assert again(TEXTS[2:]) == f"[1] {TEXTS[2]}" and len(built) == 2
    assert len(list((tmp_path / "d.jsonl.bm25").iterdir())) == 1  # the earlier one is gone
    again(TEXTS, index=str(tmp_path / "elsewhere"))
    assert len(built) == 3 and len(list((tmp_path / "elsewhere").iterdir())) == 1
    opened(documents=str(path), top_k=2)  # other options of the same documents
    assert len(built) == 4 and len(list((tmp_path / "d.jsonl.bm25").iterdir())) == 1


class Opened:
    """Leaves a file behind when it is read as a pickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def _cut(kept: Path) -> None:
    path = kept / "data.csc.index.npy"
    path.write_bytes(path.read_bytes()[:-4])


def _pickled(kept: Path) -> None:
    with (kept / "data.csc.index.npy").open("wb") as file:
        np.save(file, np.array([Opened(kept.parents[1] / "mark")], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _pickled,
        lambda kept: (kept / "data.csc.index.npy").write_bytes(
            pickle.dumps(Opened(kept.parents[1] / "mark"))
        ),
        lambda kept: (kept / "vocab.index.json").write_text("[1"),
        lambda kept: (kept / "vocab.index.json").write_text("[]"),
        lambda kept: (kept / "params.index.json").write_text('{"backend": "numba"}'),
        lambda kept: (kept / "indptr.csc.index.npy").unlink(),
        lambda kept: np.save(kept / "indices.csc.index.npy", np.zeros(3, np.int32)),
    ],
)
def test_a_damaged_index_is_built_again_and_no_pickle_is_read(
    damage: Callable[[Path], Any], tmp_path: Path
) -> None:
    documents = jsonl(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS])
    wanted = found(opened(documents=documents), "fish")
    damage(next((tmp_path / "d.jsonl.bm25").iterdir()))
    retrieval._index.cache_clear()
    assert found(opened(documents=documents), "fish") == wanted
    assert not (tmp_path / "mark").exists()


def test_an_index_that_cannot_be_kept_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = jsonl(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "d.jsonl.bm25").write_text("in the way")
    assert "gills" in found(opened(documents=documents), "gills")
    assert "could not save the index of" in caplog.text


def test_documents_that_cannot_be_searched_are_named_with_the_key(tmp_path: Path) -> None:
    key = r"rollout\.agent\.tool_options\.retrieval"
    cases: list[tuple[str, dict[str, Any]]] = [
        (rf"{key}\.documents is not set", {}),
        (
            rf"{key}\.documents=.*/none: no such file or folder",
            {"documents": f"{tmp_path}/none"},
        ),
        (
            rf"{key}\.documents=.*: the folder has no .jsonl",
            {"documents": folder(tmp_path / "a", {"x.c": "a"})},
        ),
        (
            rf"{key}\.documents=.*x.c: expected a file ending in",
            {"documents": f"{tmp_path}/a/x.c"},
        ),
        (
            rf"{key}\.documents: .*empty.md is empty",
            {"documents": folder(tmp_path / "b", {"empty.md": " \n"})},
        ),
        (
            rf"{key}\.documents: row 2 of .*c.jsonl is empty",
            {"documents": jsonl(tmp_path / "c.jsonl", [{"text": "a"}, {"text": " "}])},
        ),
        (
            (
                rf"{key}\.text_column=text: row 1 of .*d.jsonl has no text in this column \(it has: "
                rf"contents\)"
            ),
            {"documents": jsonl(tmp_path / "d.jsonl", [{"contents": "a"}])},
        ),
        (
            rf"{key}\.text_column=text: row 1 of .*n.jsonl has no text",
            {"documents": jsonl(tmp_path / "n.jsonl", [{"text": 3}])},
        ),
        (
            rf"{key}\.text_column=text: .*e.parquet has no such column \(it has: contents\)",
            {"documents": table(tmp_path / "e.parquet", {"contents": ["a"]})},
        ),
        (
            rf"{key}\.documents=.*f.jsonl contains no text",
            {"documents": jsonl(tmp_path / "f.jsonl", [])},
        ),
        (rf"{key}\.top_k=0 must be at least 1", {"documents": str(tmp_path), "top_k": 0}),
        (
            rf"unknown key {key}\.topk; did you mean {key}\.top_k",
            {"documents": str(tmp_path), "topk": 2},
        ),
    ]
    (tmp_path / "g.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "h.parquet").write_bytes(b"no table")
    (tmp_path / "i.txt").write_bytes(b"\xff\xfe")
    cases += [
        (
            rf"{key}\.documents: .*g.jsonl cannot be read: line 2 is not valid JSON",
            {"documents": f"{tmp_path}/g.jsonl"},
        ),
        (rf"{key}\.documents: .*h.parquet cannot be read", {"documents": f"{tmp_path}/h.parquet"}),
        (rf"{key}\.documents: .*i.txt cannot be read: .*utf-8", {"documents": f"{tmp_path}/i.txt"}),
    ]
    for message, options in cases:
        with pytest.raises(ConfigError, match=message):
            opened(**options)


def test_options_of_other_tools_are_refused() -> None:
    def said(**agent: Any) -> str:
        settings = AgentConfig(loop="tools", **agent)
        return "\n".join(problems(RunConfig(rollout=RolloutConfig(agent=settings)), files=False))

    assert (
        "tool_options.retrieval: rollout.agent.tools does not contain retrieval (it contains: calculator)"
        in said(tools=("calculator",), tool_options={"retrieval": {}})
    )
    assert "tool_options.retrieval=3: expected a group" in said(
        tools=("retrieval",), tool_options={"retrieval": 3}
    )
    with pytest.raises(
        ConfigError, match=r"tool_options\.calculator: this tool accepts no options"
    ):
        Toolbox(AgentConfig(tools=("calculator",), tool_options={"calculator": {"x": 1}}))
