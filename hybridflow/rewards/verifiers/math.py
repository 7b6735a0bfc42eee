"""Mathematics: checks that the answer equals the ground truth in any notation, using the package
math-verify."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hybridflow.rewards import expressions
from hybridflow.rewards.latex import cheap_prediction, parser
from hybridflow.rewards.reading import boxed, read_response
from hybridflow.rewards.time_budget import OverBudget, time_budget
from hybridflow.rewards.verifiers.base import ScoreResult, text_truth, verifier

_SOURCES = (
    *(
        "math",
        "math_dapo",
        "math_dapo_reasoning",
        "aime*",
        "lighteval/MATH",
        "HuggingFaceH4/MATH-500",
    ),
    *(
        "DigitalLearningGmbH/MATH-lighteval",
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
    ),
    *("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"),
)

_TRUTHS = 4096  # parsed ground truths cached per process
_RECORDED = 200  # characters of an answer that are recorded
_PRECISE = 7  # digits of a decimal that may stand for a fraction, like math-verify's rounding
# digits of the largest integer that a comparison may compute: a larger power cannot be interrupted
_MOST_DIGITS = 10_000
# operations that an answer leaves unevaluated
_UNDONE = re.compile(
    r"\\(?:sum|prod|int|lim|binom|[bp]?mod|equiv|gcd|lcm|lfloor|lceil|det|max|min)(?![A-Za-z])|"
    r"!|\\operatorname"
)
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\s?\{[^{}]*\}|\\[A-Za-z]+")


@verifier("math", data_sources=_SOURCES, requires="math_verify", truth=text_truth)
def math(
    response: str,
    ground_truth: str,
    *,
    literal: bool = True,
    comparison_s: float = 5.0,
    thinking_open: bool | None = None,
) -> ScoreResult:
    r"""Return 1.0 if the response's answer equals the ground truth: 1/2, 0.5 and \frac{1}{2} are
    equal.

    The answer is the content of the last \boxed{}, or else the text after the last "the answer is",
    or else the last expression in the last sentence. An unclosed box or thinking block means that
    the response was cut off and has no answer. If the ground truth is a single number, an answer
    with several numbers is wrong.

    Args:
        response: text with the answer.
        ground_truth: the answer in LaTeX or as plain text.
        literal: if the ground truth is a number, the answer must be fully evaluated: an integer,
            decimal, fraction, root or multiple of pi, but not 6+1, 13! or \sum_{i=1}^7 1. If False,
            only the value counts.
        comparison_s: time limit for a comparison in seconds; an answer that exceeds it is wrong.
        thinking_open: True if the prompt ended inside a thinking block.

    Returns:
        extra["answer"] is the parsed answer, or None; rational numbers are in lowest terms, so 0.5
        and 1/2 count as the same vote in maj@k.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    truth = text_truth(ground_truth)
    found = expressions.stated_answer(read_response(response, bool(thinking_open)).answer)
    _functions()  # the import takes seconds, and must not be interrupted
    try:
        with time_budget(comparison_s):
            _expected(truth)
            right = found is not None and _equal(truth, found, literal)
    except (OverBudget, RecursionError):
        right = False
    return ScoreResult(
        float(right),
        {"answer": found if found is None else expressions.canonical(found)[:_RECORDED]},
    )


def _equal(truth: str, found: str, literal: bool) -> bool:
    if not expressions.readable(found):
        return False
    expected = expressions.plain(truth)
    given = expressions.plain(found)
    if expected.replace(" ", "") == given.replace(" ", ""):
        return True
    word = expressions.words(truth)
    said = expressions.words(found)
    if word is not None:
        return said is not None and expressions.same_words(word, said)
    base = expressions.in_base(expected)
    given_base = expressions.in_base(given)
    if base or given_base:
        return base == given_base
    return (
        bool(given)
        and _same_name_and_unit(expected, given)
        and _equal_expressions(expected, given, literal)
    )


def _equal_expressions(expected: str, given: str, literal: bool) -> bool:
    wanted = expressions.literals(expected)
    numbers = expressions.literals(given)
    if wanted is None or numbers is None:
        undone = set(_UNDONE.findall(given)) - set(_UNDONE.findall(expected))
        if literal and (wanted is not None or undone):
            return False
        with_names = "=" in expected and "=" in given
        one = _letters(expected, with_names)
        other = _letters(given, with_names)
        return (one == other or (wanted is not None and not literal)) and _verified(expected, given)
    if len(wanted) == 1 and len(numbers) != 1:
        return False
    if len(wanted) == len(numbers) == 1 and not _is_relation(given):
        return _same_number(wanted[0], numbers[0])
    return _verified(_bare(expected), _bare(given))


def _same_number(wanted: str, given: str) -> bool:
    one = expressions.rational(wanted)
    other = expressions.rational(given)
    if one is None or other is None:
        return _verified(wanted, given)
    if one == other or (("%" in wanted) != ("%" in given) and one * 100 in (other, other * 10000)):
        return True
    texts = (wanted, given)
    # a long decimal may stand for a fraction
    precise = any(
        "." in text and len(re.sub(r"\D", "", text).lstrip("0")) >= _PRECISE for text in texts
    )
    return precise and abs(one - other) <= Fraction(1, 10**6) * min(
        abs(one), abs(other), Fraction(1)
    )


def _same_name_and_unit(expected: str, given: str) -> bool:
    """Return False if both answers state a name (x = 5, y = 5) or a unit (cm, m) and the two
    differ, else True."""
    rest, name = expressions.without_name(expected)
    given_rest, given_name = expressions.without_name(given)
    unit = expressions.without_unit(rest)[1]
    given_unit = expressions.without_unit(given_rest)[1]
    return (
        not name or not given_name or name.replace(" ", "") == given_name.replace(" ", "")
    ) and (not unit or not given_unit or unit[0].lower() == given_unit[0].lower())


def _is_relation(text: str) -> bool:
    return re.search(r"<|>|\\le|\\ge|\\in(?!f)|\\ne", text) is not None


def _bare(text: str) -> str:
    return expressions.without_unit(text)[0] if "," not in text else text


def _letters(text: str, with_name: bool) -> set[str]:
    """Return the variables in an expression. Unlike math-verify, this is case-sensitive."""
    rest = text if with_name else expressions.without_name(text)[0]
    return {sign for sign in _COMMAND.sub(" ", rest) if sign.isalpha()}


def _verified(truth: str, found: str) -> bool:
    """Return True if math-verify considers the two expressions equal."""
    parse, verify = _functions()
    with cheap_prediction():
        expected = parse(boxed(truth))
        given = parse(boxed(found))
    if any(map(_is_costly, (*expected, *given))):
        return False
    return bool(expected and given) and bool(verify(expected, given))


def _expected(truth: str) -> None:
    """Raise ValueError if a ground truth is empty after its decoration is removed."""
    if not expressions.plain(truth):
        raise ValueError(f"the ground truth {truth!r} is not a valid expression")


def _is_costly(expression: Any) -> bool:
    """Return True if evaluating an expression would create integers with more than `_MOST_DIGITS`
    digits."""
    import sympy

    return isinstance(expression, (sympy.Basic, sympy.MatrixBase)) and any(
        _digits(part) > _MOST_DIGITS for part in sympy.preorder_traversal(expression)
    )


def _digits(expression: Any) -> float:
    """Return an upper bound on the number of decimal digits of a power or factorial."""
    import sympy

    limit = float(_MOST_DIGITS)
    if isinstance(expression, sympy.Pow) and not expression.free_symbols:
        base, exponent = expression.args
        if _digits(exponent) > 5 or _digits(base) > limit:
            return 2 * limit
        return (
            float(abs(exponent.evalf(5, maxn=20))) * max(_digits(base), 1.0)
            if exponent.is_number
            else 0.0
        )
    if isinstance(expression, (sympy.factorial, sympy.binomial)) and not expression.free_symbols:
        size = max(map(_digits, expression.args))
        return 2 * limit if size > 4 else 10.0 ** (size + 1)
    if isinstance(expression, sympy.Integer):
        return abs(int(expression)).bit_length() * 0.302 + 1
    return max(map(_digits, getattr(expression, "args", ())), default=0.0)


@functools.cache
def _functions() -> tuple[Callable[[str], Any], Callable[[Any, Any], bool]]:
    """Return math-verify's functions for parsing an expression and for comparing two.

    Their timeouts are replaced by `time_budget`, because math-verify's own error handlers swallow
    timeouts. Parsed ground truths are cached, because all samples of a prompt share a ground truth.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    parser()
    for part in ("parser", "grader"):  # they warn that calls have no timeout of math-verify's
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    read = functools.partial(
        parse, extraction_config=[LatexExtractionConfig()], parsing_timeout=None
    )
    return (
        functools.lru_cache(_TRUTHS)(read),
        functools.partial(verify, timeout_seconds=None, allow_set_relation_comp=True),
    )
