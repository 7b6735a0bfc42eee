"""Text processing for mathematical answers: extraction from a response, removal of decoration, and
detection of literals.

A literal is a fully evaluated number: an integer, decimal, fraction, root or multiple of pi,
optionally with a percent sign, a power of ten or a base. `6+1`, `13!` and `3^5 \\bmod 7` are not
literals, regardless of their value.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hybridflow.rewards.reading import last_box

# characters searched for an answer after "the answer is", or at the end of a response
_REACH = 2000
# limits for an answer; no real result is longer or more deeply nested
_MAX_LENGTH = 1000
_MAX_DEPTH = 40

_STATED = re.compile(
    r"(?i:\banswers?\b[^.\n]{0,60}?(?:\bis\b|\bare\b|[:：=])|\bfinal answer\b[*_#: "
    r"\t]{0,8}\n)|答案(?:[是为：:]|\s)|"
    r"(?i:\b(?:réponse|respuesta|risposta|antwort|resposta|ответ)\b[^.\n]{0,30}?"
    r"(?:\b(?:est|es|è|ist|é)\b|[:=]))|"
    r"(?:答え|정답)[^.\n]{0,10}?(?:は|은|[:：])"
)
_SENTENCE_END = re.compile(
    r"\.(?=\s|$)|[。！？；\n]|[!?;](?=\s|$)|\s(?:because|since|as|so|which|where|for|when)\b"
)
_NUMBER_WITHIN = re.compile(r"(?<![\w.])[-−]?[$€£¥]?\d[\d,]*(?:\.\d+)?(?:/\d+)?\s?\\?%?")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z{])")
_OPENED = {"$$": "$$", "$": "$", r"\(": r"\)", r"\[": r"\]"}


def stated_answer(answer: str) -> str | None:
    """Extract the result stated in an answer: the last box, or else the text after the last "the
    answer is", or else the last expression in the last sentence. Returns None if there is none or
    if the last box is not closed.
    """
    box = last_box(answer)
    if box is not None:
        return box.content
    statements = list(_STATED.finditer(answer))
    if statements:
        return _first_expression(answer[statements[-1].end() :][:_REACH])
    tail = answer.rstrip()[-_REACH:]
    for begin, end in _OPENED.items():
        if (ended := tail.rstrip(".。 \n")).endswith(end):
            inner = ended[: -len(end)]
            start = inner.rfind(begin)
            return inner[start + len(begin) :].strip() if start >= 0 else None
    line = tail.rpartition("\n")[2].strip()
    if not _PROSE.search(line) and len(line) < _MAX_LENGTH:
        return line or None
    sentence = re.split(r"(?<=[.!?])\s", line)[-1]
    inline = re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)", sentence)
    if inline:
        return max(inline[-1]).strip()
    numbers = _NUMBER_WITHIN.findall(sentence)
    return numbers[-1].strip() if numbers else None


def _first_expression(text: str) -> str | None:
    text = text.lstrip(" \t\n*_:：=")
    for begin, end in _OPENED.items():
        if text.startswith(begin):
            inner, closing, _ = text[len(begin) :].partition(end)
            return inner.strip() if closing else None
    ended = _SENTENCE_END.search(text)
    return (text[: ended.start()] if ended else text).strip(" *_\t") or None


# ---- decoration

_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|bb)?|mbox|operatorname|boldsymbol)"
    r"\s?\{([^{}]*)\}"
)
_PERCENT = r"(?:percentage|percent|pct)"
_WORDS = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|nolimits)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:d|t|c)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(rf"\\text\s?\{{\s*{_PERCENT}\s*\}}|(?<=[\d\s}}])\b{_PERCENT}\b|\\?%"), "%"),
    (re.compile(r"\^\s?(?:\\circ|\{\s*\\circ\s*\})|°|\\degree\b|\\text\s?\{\s*degrees?\s*\}"), ""),
    (re.compile(r"(?<=[\d\s}])\bdegrees?\b"), ""),
    (re.compile(r"\\?\$|[€£¥₹]"), ""),
    (re.compile(r"\{,\}"), ","),
    (
        re.compile(r"\\(?:(?:text|math)(?:bf|it|rm|sf)?|boldsymbol)\s?\{\s*([-+\d.,()]*)\s*\}"),
        r"\1",
    ),
    (re.compile(r"^\s*\{([-+\d.,]*)\}\s*$"), r"\1"),
    (re.compile(r"^\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|∈)"), ""),
    (re.compile(r"(?<!\\)\\(?:[,!;: ]|quad\b|qquad\b)|~|\u202f|\u00a0"), " "),
    (re.compile(r"(?<=\d)\s+(?=\d{3}(?!\d))(?![^(]*\))"), ""),
    (re.compile(r"\u2212|\u2013"), "-"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"×"), r"\\times "),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"√"), r"\\sqrt "),
    (re.compile(r"±"), r"\\pm "),
    (re.compile(r"≤|\\leq(?![A-Za-z])|\\leqslant(?![A-Za-z])"), r"\\le "),
    (re.compile(r"≥|\\geq(?![A-Za-z])|\\geqslant(?![A-Za-z])"), r"\\ge "),
    (
        re.compile(r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?![\d,])"),
        lambda found: found[1].replace(",", ""),
    ),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
)
_UNIT = re.compile(
    r"(?:(?<=[\d}%])|(?<=\\pi))\s*"
    r"(?:\\(?:text|mathrm|mbox|textrm|rm)\s?\{[^{}\d]*\}(?:\s?\^\s?\{?\s?[23]\s?\}?|[²³])?|"
    r"(?:(?:square|cubic|sq)\.? )?[A-Za-z]{2,}(?:[ /][A-Za-z]+){0,3}\.?(?:\^\{?[23]\}?|[²³])?|"
    r"[ ]?[mgshL](?:\^\{?[23]\}?|[²³])?|"
    r"[\u4e00-\u9fff\u3040-\u30ff\uac00-\ud7af]{1,6})\s*$"
)
_NAME = re.compile(
    r"^[A-Za-z\\|∠△][A-Za-z0-9\\{}_'()|, ∠△]{0,40}?(?:=|\\approx(?![A-Za-z])|≈)\s*(?=[^=])"
)


_END_OF_SENTENCE = re.compile(r"(?<!\\)[.。,，;；]{1,3}$")


def readable(text: str) -> bool:
    """Return True if the text is within the length and nesting limits."""
    depth = deepest = 0
    for sign in text if len(text) <= _MAX_LENGTH else ():
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return len(text) <= _MAX_LENGTH and deepest <= _MAX_DEPTH


def plain(text: str) -> str:
    """Remove decoration from an answer: spaces, LaTeX sizes and variants, currencies, degrees,
    thousands separators."""
    text = _END_OF_SENTENCE.sub("", text.strip().strip("*").strip()).strip()
    for begin, end in _OPENED.items():
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin):
            text = text[len(begin) : -len(end)].strip().rstrip(".")
    for pattern, put in _WORDS:
        text = pattern.sub(put, text)
    return " ".join(text.split())


def words(text: str) -> str | None:
    """Return the answer if it is a name or phrase without digits or operators ("east", "No
    solution", "(C)", "CAT", "星期三"), else None."""
    bare = text.strip().strip("$").strip()
    was_wrapped = _WRAPPED.search(bare) is not None
    while bare != (inner := _WRAPPED.sub(r" \1 ", bare)):
        bare = inner
    spaced = re.sub(r"[\"'“”.,，。!?()\s]+", " ", bare.replace("\\ ", " "))
    bare = " ".join(spaced.split())
    letters = bare.replace(" ", "").replace("-", "")
    if not letters.isalpha():
        return None
    is_name = (
        len(letters) > 3
        or len(letters) == 1
        or was_wrapped
        or not letters.isascii()
        or letters.isupper()
    )
    return bare if is_name else None


def same_words(one: str, other: str) -> bool:
    """Compare two results of `words`. Case is ignored only in phrases; x and X differ, as do AB and
    BA."""
    if len(one) == 1 or (one.isupper() and other.isupper()):
        return one == other
    return one.casefold() == other.casefold()


def without_unit(text: str) -> tuple[str, str]:
    """Split an answer into a number and its unit ("" if there is none)."""
    found = _UNIT.search(text)
    if found is None:
        return text, ""
    unit = re.sub(r"[^A-Za-z]|text|mathrm|mbox", "", found.group())
    return text[: found.start()].rstrip(), unit


def without_name(text: str) -> tuple[str, str]:
    """Split an answer into its value and its name: "x = 5" gives ("5", "x"). For a chain of
    equations, the last term is used.
    """
    found = _NAME.match(text)
    if found is None or any(sign in text for sign in ("<", ">", "\\le", "\\ge", ",", ";")):
        return text, ""
    _, _, value = text.rpartition("=")
    name, *_ = re.split(r"=|\\approx|≈", text)
    return value.strip() or text, name.strip()


def _bare(text: str) -> str:
    """Return an answer's value without its name and unit."""
    value, _ = without_name(text)
    bare, _ = without_unit(value)
    return bare


# ---- literals

_DIGITS = r"(?:\d+(?:\.\d*)?|\.\d+)"
_POWER = r"\^(?:\{\(?|\(|)(?:1/\d{1,3}|\\frac\{1\}\{\d{1,3}\})(?:\)?\}|\)|)"
_SYMBOL = rf"(?:\\sqrt(?:\[\d{{1,3}}\])?\{{{_DIGITS}\}}|\\pi|(?:\({_DIGITS}\)|{_DIGITS}){_POWER})"
_TIMES = r"(?:\*|\\cdot|\\times)?"
_TERM = (
    rf"(?:{_DIGITS}(?:{_TIMES}{_SYMBOL}){{1,3}}|{_SYMBOL}(?:{_TIMES}{_SYMBOL}){{0,2}}|{_DIGITS})"
)
_FRACTION = rf"(?:\\frac\{{[+-]?{_TERM}\}}\{{[+-]?{_TERM}\}}|\(?[+-]?{_TERM}\)?/\(?[+-]?{_TERM}\)?)"
_RATIONAL = (
    r"(?P<sign>[+-]?)(?:(?P<whole>\d+)?\\frac\{(?P<a>[+-]?DIGITS)\}\{(?P<b>[+-]?DIGITS)\}|"
    r"(?:(?P<w>\d+)\ )?\(?(?P<c>[+-]?DIGITS)\)?/\(?(?P<d>[+-]?DIGITS)\)?|"
    r"(?P<n>DIGITS)(?:[eE](?P<e>[+-]?\d{1,4})|"
    r"(?:\*|\\cdot|\\times)10\^(?:\{(?P<f>[+-]?\d{1,4})\}|(?P<g>\d)))?)(?P<percent>%?)"
).replace("DIGITS", _DIGITS)
_RATIONAL_PATTERN = re.compile(_RATIONAL)
_LITERAL = re.compile(
    rf"[+-]?(?:(?:{_FRACTION})(?:{_TIMES}{_SYMBOL}){{0,2}}|{_TERM})%?|"
    r"[+-]?\\infty|\\emptyset|\\varnothing"
)
_MIXED = re.compile(r"[+-]?\d+ \d+/\d+")  # its space is significant
_IN_BASE = re.compile(r"\(?(\w+?)\)?_\{?\(?(\d+)\)?\}?")
_PARTS = re.compile(
    r"[,;()\[\]&]|\\\{|\\\}|\\lbrace|\\rbrace|\\cup|∪|"
    r"\\(?:begin|end)\{\w+\}|\\\\|\\text\{\s*(?:and|or)\s*\}|"
    r"\b(?:and|or)\b|[和或]"
)
_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>|\\in(?![A-Za-z])")


def rational(text: str) -> Fraction | None:
    """Return the exact value of a literal without roots or pi; a percent sign divides it by 100.
    None for any other text."""
    is_mixed = " " in text and "/" in text
    found = _RATIONAL_PATTERN.fullmatch(text if is_mixed else text.replace(" ", ""))
    if found is None:
        return None
    above = Fraction(found["a"] or found["c"] or found["n"])
    below = Fraction(found["b"] or found["d"] or 1)
    if not below:
        return None
    whole = int(found["whole"] or found["w"] or 0)
    exponent = int(found["e"] or found["f"] or found["g"] or 0)
    value = (whole + above / below) * Fraction(10) ** exponent
    if found["sign"] == "-":
        value = -value
    return value / 100 if found["percent"] else value


def canonical(text: str) -> str:
    """Return a canonical form that is the same for answers that differ only in decoration and for
    equal rational numbers."""
    bare = _bare(plain(text)) if readable(text) else text
    value = rational(bare)
    if value is None or max(abs(value.numerator), value.denominator) >= 10**300:
        return bare
    return str(value)


def in_base(text: str) -> tuple[str, str] | None:
    """Return the digits and the base of a number such as 1101_2; None for any other text."""
    found = _IN_BASE.fullmatch(re.sub(r"\\text\{(.*?)\}|\s", r"\1", text))
    return (found[1], found[2]) if found else None


def is_literal(text: str) -> bool:
    """Return True if a text without spaces is a single literal."""
    return _LITERAL.fullmatch(text) is not None or rational(text) is not None


def literals(text: str) -> list[str] | None:
    """Return the literals in an answer that consists only of literals: a single number, or the
    elements of a pair, set, interval, union, matrix or inequality. None if any part is not a
    literal."""
    text, _ = without_name(text)
    bare, _ = without_unit(text)
    whole = bare if _MIXED.fullmatch(bare) else bare.replace(" ", "")
    if is_literal(whole):
        return [whole]
    parts = []
    for part in _PARTS.split(text):
        sides = _RELATION.split(part)
        for side in sides:
            bare = _bare(side.strip()).replace(" ", "")
            both = bare.removeprefix("\\pm")
            is_variable = len(bare) == 1 and bare.isalpha() and len(sides) > 1
            if is_literal(both):
                parts.append(both)
                if both != bare:
                    parts.append(f"-{both}")
            elif bare and not is_variable:
                return None
    return parts or None
