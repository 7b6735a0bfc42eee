"""Extraction of a command from a shell script without running it. Variables, arrays and simple
conditions are evaluated; other commands are skipped."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
}
_MAX_CHARACTERS = 1_000_000
_SPACES = " \t\r"
_SEPARATORS = "\n;&|"  # of statements
_ENDS = _SPACES + _SEPARATORS  # of a word

Value = str | list[str]  # of a variable


@dataclass
class Script:
    """The words of a command in a script, and the parts of the script that could not be evaluated.

    Attributes:
        words: words of the first command that contains `wanted`; empty if there is none.
        notes: one line per variable without a value and per condition that could not be evaluated.
    """

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def command_of(text: str, wanted: str, environment: Mapping[str, str]) -> Script:
    """Read the first command in a bash script in which a word contains `wanted`.

    Args:
        environment: variables that the script inherits.

    Raises:
        ValueError: a quotation mark or bracket is not closed.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"more than {_MAX_CHARACTERS} characters")
    reader = _Reader(text.replace("\\\n", ""), environment)
    taken: list[bool] = []  # for each open `if`: whether its current branch is executed
    decided: list[bool] = []  # and whether one of its branches has been
    for statement in reader.statements():
        first = statement[0] if statement else ""
        if first == "if":
            condition = all(taken) and reader.holds(statement[1:])
            taken.append(condition)
            decided.append(condition)
        elif first in ("elif", "else") and taken:
            now = not decided[-1] and (first == "else" or reader.holds(statement[1:]))
            taken[-1] = now
            decided[-1] |= now
        elif first == "fi" and taken:
            taken.pop()
            decided.pop()
        elif all(taken):
            if not reader.assigned and any(wanted in word for word in statement):
                return Script(statement, reader.notes)
            reader.keep()
    return Script([], reader.notes)


class _Reader:
    """Splits a script into statements and expands the variables in them."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.text = text
        self.at = 0
        self.variables: dict[str, Value] = dict(environment)
        self.notes: list[str] = []
        # the current statement's assignment: name, value, and whether it appends
        self.assigned: tuple[str, Value, bool] | None = None

    def statements(self) -> Iterator[list[str]]:
        """Yield the words of each statement. `then` and `do` separate statements too."""
        words: list[str] = []
        self.assigned = None
        while self.at < len(self.text):
            letter = self.text[self.at]
            may_assign = words in ([], ["export"])
            if letter in _SEPARATORS:
                self.at += 1
                if words or self.assigned:
                    yield words
                words = []
                self.assigned = None
            elif letter in _SPACES:
                self.at += 1
            elif letter == "#":
                self._skip_comment()
            elif may_assign and self._reads_assignment():
                words = []
            else:
                words += self._word()
                if words in (["then"], ["do"]):
                    words = []
        if words or self.assigned:
            yield words

    def keep(self) -> None:
        """Execute the current statement if it is an assignment."""
        if self.assigned is None:
            return
        name, value, more = self.assigned
        before = self.variables.get(name)
        if more and isinstance(before, list) and isinstance(value, list):
            value = [*before, *value]
        elif more and isinstance(before, str) and isinstance(value, str):
            value = before + value
        self.variables[name] = value

    def holds(self, condition: Sequence[str]) -> bool:
        """Return True if a test (`[ a = b ]`, `[[ a == b ]]`) is true. All other conditions count
        as false, and a note is added."""
        words = [word for word in condition if word not in ("[", "[[", "]", "]]")]
        match words:
            case [left, sign, right] if sign in _COMPARED:
                return _COMPARED[sign](left, right)
            case ["-z", text]:
                return text == ""
            case ["-n", text]:
                return text != ""
        text = " ".join(condition)
        self.notes.append(f"if {text}: assumed to be false")
        return False

    def _reads_assignment(self) -> bool:
        """Read an assignment into `assigned`. Returns False if there is none at this position."""
        found = _ASSIGNED.match(self.text, self.at)
        if found is None:
            return False
        self.at = found.end()
        value: Value = ""
        if self.text.startswith("(", self.at):
            value = self._array()
        elif self.at < len(self.text) and self.text[self.at] not in _ENDS:
            value = "".join(self._word(splits=False))
        self.assigned = (found["name"], value, found["more"] == "+")
        return True

    def _array(self) -> list[str]:
        self.at += 1
        values: list[str] = []
        while True:
            if self.at >= len(self.text):
                raise ValueError("unclosed parenthesis in an array")
            letter = self.text[self.at]
            if letter == ")":
                self.at += 1
                return values
            if letter in " \t\r\n":
                self.at += 1
            elif letter == "#":
                self._skip_comment()
            else:
                values += self._word(")")

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _word(self, stops: str = "", splits: bool = True) -> list[str]:
        """Read one word and return its expansion, which consists of several words for an array and,
        if `splits` is set, for an unquoted variable with spaces."""
        pieces: list[str] = []
        whole: list[str] = []  # words before the last one, which an unquoted variable contained
        expanded: list[str] | None = None
        ends = _ENDS + stops
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            letter = self.text[self.at]
            count = len(pieces)
            found = self._quoted(pieces, letter) if letter in "'\"" else self._piece(pieces)
            if found is not None:
                expanded = found
            if splits and letter == "$":
                parts = "".join(pieces[count:]).split()
                if len(parts) > 1:
                    before = "".join(pieces[:count])
                    whole += [before + parts[0], *parts[1:-1]]
                    pieces = [parts[-1]]
        if self.at == start:  # a lone bracket
            self.at += 1
            return [self.text[start]]
        if expanded is not None and not any(pieces):
            return expanded
        return [*whole, "".join(pieces)]

    def _quoted(self, pieces: list[str], mark: str) -> list[str] | None:
        """Read quoted text into `pieces`. If it contains an array, return the array's words."""
        if mark == "'":
            end = self._closing("'", self.at + 1)
            pieces.append(self.text[self.at + 1 : end])
            self.at = end + 1
            return None
        expanded: list[str] | None = None
        self.at += 1
        while not self.text.startswith('"', self.at):
            if self.at >= len(self.text):
                raise ValueError('unclosed quotation mark "')
            found = self._piece(pieces)
            if found is not None:
                expanded = found
        self.at += 1
        return expanded

    def _piece(self, pieces: list[str]) -> list[str] | None:
        """Read one character or expansion into `pieces`. If it is an array, return the array's
        words."""
        letter = self.text[self.at]
        if letter == "\\" and self.at + 1 < len(self.text):
            pieces.append(self.text[self.at + 1])
            self.at += 2
            return None
        if letter == "`":
            self.at = self._closing("`", self.at + 1) + 1
            self.notes.append("the output of a command is unknown")
            return None
        if letter != "$":
            pieces.append(letter)
            self.at += 1
            return None
        return self._expansion(pieces)

    def _expansion(self, pieces: list[str]) -> list[str] | None:
        start = self.at
        rest = start + 1
        if self.text.startswith("((", rest):
            end = self._matching(rest, "(", ")")
            pieces.append(self._computed(self.text[rest + 2 : end - 1]))
        elif self.text.startswith("(", rest):
            end = self._matching(rest, "(", ")")
            command = self.text[start : end + 1]
            self.notes.append(f"the output of {command} is unknown")
        elif self.text.startswith("{", rest):
            end = self._matching(rest, "{", "}")
            found = self._parameter(self.text[rest + 1 : end])
            self.at = end + 1
            if isinstance(found, list):
                return found
            pieces.append(found)
            return None
        elif found_name := _NAME.match(self.text, rest):
            pieces.append(self._first_of(found_name[0]))
            end = found_name.end() - 1
        elif self.text[rest : rest + 1] in ("@", "*"):
            self.at = rest + 1
            return []  # arguments of the script
        else:
            pieces.append("$")
            end = self.at
        self.at = end + 1
        return None

    def _parameter(self, inside: str) -> Value:
        """Expand the expression inside `${...}`."""
        name = _NAME.match(inside) or re.match(r"\d+", inside)  # a number: the script's argument
        if name is None:
            self.notes.append(f"the value of ${{{inside}}} is unknown")
            return ""
        rest = inside[name.end() :]
        if rest in ("[@]", "[*]"):
            value = self._value(name[0])
            return value if isinstance(value, list) else [value]
        known = self.variables.get(name[0])
        if rest[:2] in (":-", ":=") or rest[:1] in ("-", "="):
            if known:
                return known
            default = rest.lstrip(":")[1:]
            return "".join(self._expanded(default))
        if rest:
            self.notes.append(f"the value of ${{{inside}}} is unknown")
            return ""
        return self._first_of(name[0])

    def _expanded(self, text: str) -> list[str]:
        """Expand a default value, which may contain variables and quotation marks."""
        outer = self.text
        at = self.at
        self.text = text
        self.at = 0
        words: list[str] = []
        try:
            while self.at < len(text):
                letter = text[self.at]
                if letter in _ENDS:
                    words.append(letter)
                    self.at += 1
                else:
                    words += self._word(splits=False)
        finally:
            self.text = outer
            self.at = at
        return words

    def _first_of(self, name: str) -> str:
        """Return the value of a variable; of an array, the first element."""
        value = self._value(name)
        if isinstance(value, list):
            return value[0] if value else ""
        return value

    def _value(self, name: str) -> Value:
        if name not in self.variables:
            self.notes.append(f"${name} has no value in the script or in the environment")
            self.variables[name] = ""
        return self.variables[name]

    def _computed(self, expression: str) -> str:
        """Compute `$((...))`: integers, variables, + - * / % and parentheses."""

        def value(node: ast.expr) -> int:
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            if isinstance(node, ast.Name):
                found = self._value(node.id)
                return int(found) if isinstance(found, str) and found else 0
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return -value(node.operand)
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
                compute = _OPERATIONS[type(node.op)]
                return compute(value(node.left), value(node.right))
            raise ValueError(ast.dump(node))

        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", expression)
        try:
            tree = ast.parse(plain.strip(), mode="eval")
            return str(value(tree.body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
            self.notes.append(f"$(({expression})) cannot be computed")
            return ""

    def _closing(self, mark: str, start: int) -> int:
        end = self.text.find(mark, start)
        if end < 0:
            raise ValueError(f"unclosed quotation mark {mark}")
        return end

    def _matching(self, start: int, opener: str, closer: str) -> int:
        """Return the position of the bracket that matches the one at `start`."""
        depth = 0
        for position in range(start, len(self.text)):
            depth += self.text[position] == opener
            depth -= self.text[position] == closer
            if depth == 0:
                return position
        raise ValueError(f"unclosed bracket {opener}")
