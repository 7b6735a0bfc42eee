"""Transcripts in the documents, walked: each command of a ```console block runs as the reader would
type it, and its output is compared with what the reader is shown.

`Walk.follow` also writes the files of a document, which are its blocks with a title. A command begins with `$ ` and goes on after a backslash. In the output `[...]` stands for anything,
on a line of its own for any lines; a number stands for any number, one of five digits or more (a
job's) for the same one from there on. A command fails where its output begins with `hybridflow: `,
and only there.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.walks.package import ROOT

TIMEOUT_S = 400
_NUMBER = r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?"
_TOKENS = re.compile(rf"(\[\.\.\.\]|(?<![\w.]){_NUMBER}(?!\w))")


@dataclass(frozen=True)
class Command:
    """A command of a transcript, and the output that the reader is shown."""

    text: str
    shown: str

    @property
    def fails(self) -> bool:
        """True where the reader is shown a refusal."""
        return self.shown.startswith("hybridflow: ")


def commands(document: str, section: str = "") -> list[Command]:
    """The commands of a document's ```console blocks, in order; of one section where it is
    named."""
    text = (ROOT / document).read_text(encoding="utf-8")
    if section:
        text = re.split(r"\n#+ ", text.split(f"# {section}\n")[1])[0]
    return [
        Command(*_split(part))
        for body in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
    ]


def _split(part: str) -> tuple[str, str]:
    """The command, over all lines that end with a backslash, and the rest."""
    found = re.match(r"(?:.*\\\n)*.*\n", part)
    assert found is not None, part
    return found[0].rstrip("\n"), part[found.end() :]


@dataclass
class Walk:
    """A reader in a folder of their own, who types the commands of a document one after another."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)  # as shown -> as it is here

    def walk(self, document: str, section: str = "") -> None:
        """Run all commands; AssertionError at the first one that ends or prints otherwise than
        shown."""
        todo = commands(document, section)
        assert todo, f"{document} has no console block in {section or 'it'}"
        for command in todo:
            self.run(command)

    def follow(self, document: str) -> None:
        """Write the files of a document (blocks with a title) and run its commands, in the order of
        the document."""
        text = (ROOT / document).read_text(encoding="utf-8")
        found = re.findall(
            r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
        )
        assert any(language == "console" for language, _, _ in found), document
        for language, title, body in found:
            if title:
                path = self.folder / title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(body, encoding="utf-8")
            elif language == "console":
                for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                    self.run(Command(*_split(part)))

    def run(self, command: Command) -> str:
        """Run a command and compare; returns what it printed."""
        text = self._known(command.text)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "COLUMNS": "120", **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_S,
        )
        found = re.fullmatch(
            self._pattern(command.shown), done.stdout.rstrip("\n") + "\n" * bool(done.stdout)
        )
        told = f"$ {text}\n" + "\n".join(
            difflib.ndiff(command.shown.splitlines(), done.stdout.splitlines())
        )
        assert found is not None, f"the output is not what the document shows (-)\n{told}"
        assert bool(done.returncode) == command.fails, f"status {done.returncode}\n{told}"
        self.numbers |= {name[1:]: value for name, value in found.groupdict().items()}
        return done.stdout

    def _known(self, text: str) -> str:
        """The text with the numbers that were learned in place of those shown."""
        return re.sub(r"\d{5,}", lambda found: self.numbers.get(found[0], found[0]), text)

    def _pattern(self, shown: str) -> str:
        learned: set[str] = set()
        lines = []
        for line in shown.splitlines():
            tokens = enumerate(_TOKENS.split(line))
            parts = [
                self._token(part, learned) if at % 2 else re.escape(part) for at, part in tokens
            ]
            lines.append(r"(?:.*\n)*?" if line == "[...]" else "".join(parts) + r" *\n")
        return "".join(lines)

    def _token(self, token: str, learned: set[str]) -> str:
        """The pattern of a number or of `[...]`."""
        if token == "[...]":
            return ".*?"
        if not re.fullmatch(r"\d{5,}", token):
            return _NUMBER
        if token in self.numbers:
            return self.numbers[token]
        if token in learned:
            return f"(?P=n{token})"
        learned.add(token)
        return rf"(?P<n{token}>\d+)"
