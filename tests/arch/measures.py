"""Measures of how dense the code reads, printed for people: `python -m tests.arch.measures
[FOLDER]`.

One line per room: AST nodes, lines, tokens per line, and parallel assignments (`a, b = x, y`),
comprehensions and lines of 110 columns or more per 1,000 lines. Below, how often docstrings use the
words of docs/style.md's dialect, per 1,000 words. `FOLDER` is another checkout, to compare two
commits. `test_size_budget.py` bounds the rates of hybridflow.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.arch.files import ROOT, nodes, parse

FOLDERS = ("hybridflow", "benchmarks", "kernels", "tests")
WIDE = 110
DIALECT = (
    "what",
    "says",
    "where",
    ", which",
    "lie",
    "lies",
    "beside",
    "nobody",
    "somebody",
    "of its own",
    "asked",
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LAYOUT = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}


def measure(file: Path) -> Counter[str]:
    """Counts of one file."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    counts = Counter(lines=len(lines), wide=sum(len(line) >= WIDE for line in lines))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    counts["tokens"] = sum(token.type not in _LAYOUT for token in tokens)
    for node in nodes(source):
        counts["nodes"] += 1
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
        if isinstance(node, ast.Assign):
            counts["parallel"] += isinstance(node.value, ast.Tuple) and isinstance(
                node.targets[0], ast.Tuple
            )
    return counts


def rates(counts: Counter[str]) -> dict[str, float]:
    """Tokens per line; parallel assignments, comprehensions and wide lines per 1,000 lines."""
    lines = max(1, counts["lines"])
    per_thousand = {
        name: 1000 * counts[name] / lines for name in ("parallel", "comprehensions", "wide")
    }
    return {"tokens": counts["tokens"] / lines, **per_thousand}


def function_sizes(file: Path) -> dict[str, int]:
    """{`name:line`: AST nodes} of all functions of a file; a function counts those inside it."""
    sizes: dict[str, int] = {}

    def count(node: ast.AST) -> int:
        size = 1 + sum(map(count, ast.iter_child_nodes(node)))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            sizes[f"{node.name}:{node.lineno}"] = size
        return size

    count(parse(file.read_text(encoding="utf-8")))
    return sizes


def docstrings(file: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def main(root: Path) -> None:
    rooms: dict[str, Counter[str]] = {}
    words: Counter[str] = Counter()
    for file in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        parts = file.relative_to(root).parts
        if any(part.startswith(".") for part in parts):
            continue  # a peer that a benchmark has installed
        room = "/".join(parts[:2]) if parts[0] == "hybridflow" and len(parts) > 2 else parts[0]
        rooms.setdefault(room, Counter()).update(measure(file))
        if parts[0] == "hybridflow":
            for text in docstrings(file):
                words["all"] += len(text.split())
                words.update(
                    {
                        word: len(
                            re.findall(
                                rf"\b{word}\b" if word[0] != "," else rf"{word}\b", text.lower()
                            )
                        )
                        for word in DIALECT
                    }
                )
    product = sum(
        (counts for room, counts in rooms.items() if room.startswith("hybridflow")), Counter()
    )
    print(
        f"{'room':32}{'nodes':>9}{'lines':>8}{'tokens/line':>13}{'parallel':>10}{'compr.':>8}{'wide':>7}"
    )
    for room, counts in [*rooms.items(), ("hybridflow, all", product)]:
        tokens, parallel, comprehensions, wide = rates(counts).values()
        density = f"{tokens:13.1f}{parallel:10.1f}{comprehensions:8.1f}{wide:7.1f}"
        print(f"{room:32}{counts['nodes']:9,}{counts['lines']:8,}{density}")
    print("\nper 1,000 words of docstrings in hybridflow:")
    print(
        ", ".join(f"{word!r} {1000 * words[word] / max(1, words['all']):.1f}" for word in DIALECT)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
