"""Finds docstring fragments, docstrings that only point elsewhere, and this project's former
private words.

`python tests/arch/language.py PATH ...` prints `file:line: problem` for each finding and exits with
1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

Finding = tuple[int, str]  # line, problem

# What to say instead: schedule, endpoint or slot, notification, order, in flight, outcome, lifetime
# or start, other.
NAMES = {
    "course",
    "seat",
    "seats",
    "bell",
    "bells",
    "turns",
    "underway",
    "fate",
    "fates",
    "life",
    "lives",
    "beside",
    "gone",
}
# The names of tests are sentences, where some of these words are plain English.
TEST_NAMES = NAMES - {"turns", "beside", "gone", "lives"}
_ONE = (
    "an?|the|its|this|that|one|each|every|first|second|next|last|earlier|later|new|whole|"
    "run's|engine's|process's"
)
_SEVERAL = "two|both|three|several|its|their|many|earlier|later|all|of|between|over"
TEXT = [
    (r"\bfates?\b", "fate: say outcome"),
    (r"\bunderway\b", "underway: say in flight, or what runs"),
    (r"(?<!in the )(?<!of )\bcourses?\b(?! of)", "course: say schedule or transfer"),
    (r"\bseats?\b", "seat: say slot, endpoint or connection"),
    (r"\bbells?\b", "bell: say notification"),
    (r"\bTurns\b(?=`| of|\.)", "Turns: say order or queue"),
    (rf"\b({_ONE}) life\b", "life: say lifetime, start or process"),
    (rf"\b({_SEVERAL}) lives\b", "lives: say starts or processes"),
    (r"\b(roles?|groups?|models?|workers?) beside\b", "beside: say other than, or next to"),
]

_FINITE = frozenset(
    """
    is are was were be been has have had does do did can could may might must will would shall
    should need needs says say holds hold gives give gets get takes take comes come goes go stays
    stay leaves leave keeps keep makes make runs run starts start ends end reads read writes write
    sends send receives receive counts count shows show lies lie stands stand waits wait answers
    answer learns learn trains train falls fall moves move equals equal differs differ fits fit
    fails fail uses use asks ask knows know sees see finds find belongs belong becomes become
    contains contain returns return raises raise means mean follows follow changes change matches
    match works work costs cost adds add share shares covers cover cuts cut agrees agree refuses
    refuse serves serve sleeps sleep wakes wake lives live
    """.split()  # noqa: SIM905
)
_RELATIVE = frozenset(
    """
    that which who whose whom where when while if after before until since
    """.split()  # noqa: SIM905
)
_PREPOSITION = re.compile(
    r"(By|For|From|In|On|With|At|Into|To|Under|Over|Between|Within|Without|After|Before) "
)
_POSSESSIVE = re.compile(r"(Those|These|Its|Their|His|Theirs|Ours|Hers|Such) ")
_POINTER = re.compile(
    r"(See(?: also)?|As|Like|Compare|Cf\.) (?:above\b.*|below\b.*|[`\w.]+[\w`)]*\.?)$"
)


def has_verb(sentence: str) -> bool:
    """Whether the sentence has a finite verb besides those of its subordinate clauses, as far as a
    list can tell."""
    words = [
        word.lower() for word in re.findall(r"[A-Za-z']+", re.sub(r"`[^`]*`", "x", sentence))[1:]
    ]
    return sum(word in _FINITE for word in words) > sum(word in _RELATIVE for word in words)


def docstring_problem(text: str) -> str | None:
    """What is wrong with the first sentence of a docstring, if anything is."""
    sentence = " ".join(re.split(r"(?<=[.!?])\s", text.strip(), maxsplit=1)[0].split())
    if sentence.startswith("See ") or _POINTER.match(sentence):
        return (
            f"a pointer alone: {sentence!r}; say what it does, or leave the docstring out where a "
            "protocol has it"
        )
    if sentence.startswith(("Of ", "Whose ", "Whom ")):
        return f"a fragment: {sentence!r}; begin with the noun it speaks of"
    if _POSSESSIVE.match(sentence) and not has_verb(sentence):
        return f"a fragment: {sentence!r}; begin with the noun it speaks of"
    if (
        _PREPOSITION.match(sentence)
        and len(sentence.split()) <= 12
        and not has_verb(sentence)
        and "," not in sentence
    ):
        return f"a fragment: {sentence!r}; say what it is"
    return None


def words_of(name: str) -> set[str]:
    """The words of an identifier in snake or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def defined_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Line, name and whether it is a test's, of everything that the module defines."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name, node.name.startswith("test_")
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, False


def findings(
    source: str, stem: str = "", nodes: Sequence[ast.AST] | None = None
) -> Iterator[Finding]:
    """Every problem of a file, in no order. `nodes` are those of its syntax tree, where the caller
    has them."""
    nodes = tuple(ast.walk(ast.parse(source))) if nodes is None else nodes
    texts: list[Finding] = []
    if words_of(stem) & (TEST_NAMES if stem.startswith("test_") else NAMES):
        yield 1, f"the module's name {stem} is a private word"
    for line, name, is_test in defined_names(nodes):
        if found := words_of(name) & (TEST_NAMES if is_test else NAMES):
            yield line, f"the name {name} has the private word {', '.join(sorted(found))}"
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            line = node.body[0].lineno
            texts.append((line, text))
            if problem := docstring_problem(text):
                yield line, problem
    # tokenize takes much longer than this
    if any(re.search(pattern, source) for pattern, _ in TEXT):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                texts.append((token.start[0], token.string))
    for line, text in texts:
        for pattern, problem in TEXT:
            if match := re.search(pattern, text):
                yield line + text[: match.start()].count("\n"), problem


def main(paths: list[str]) -> int:
    """Print what is found under the paths; 1 if there is anything."""
    found = 0
    for path in paths:
        files = sorted(Path(path).rglob("*.py")) if Path(path).is_dir() else [Path(path)]
        for file in files:
            for line, problem in sorted(set(findings(file.read_text(encoding="utf-8"), file.stem))):
                found += 1
                print(f"{file}:{line}: {problem}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
