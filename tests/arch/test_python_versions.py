"""Every file is written for Python 3.11 to 3.13: it compiles, and uses nothing that 3.12 or 3.13
took out."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.files import ROOT, nodes, python_files

NEWER = ("3.12", "3.13")
FOLDERS = ("hybridflow", "kernels", "tests", "benchmarks", "examples", "requirements", "launch")
# https://docs.python.org/3.12/whatsnew/3.12.html and 3.13.html, "Removed"
REMOVED_MODULES = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),  # 3.12
    *(
        "aifc",
        "audioop",
        "cgi",
        "cgitb",
        "chunk",
        "crypt",
        "imghdr",
        "lib2to3",
        "mailcap",
        "msilib",
        "nis",
        "nntplib",
    ),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
}
REMOVED_NAMES = {
    *(
        "pkgutil.ImpImporter",
        "pkgutil.ImpLoader",
        "ssl.wrap_socket",
        "ssl.match_hostname",
        "ssl.RAND_pseudo_bytes",
    ),
    *(
        "configparser.SafeConfigParser",
        "sqlite3.enable_shared_cache",
        "sqlite3.OptimizedUnicode",
        "locale.format",
    ),
    *("importlib.find_loader", "importlib.resources.contents", "locale.resetlocale"),
    *(
        "ftplib.FTP_TLS.ssl_version",
        "unittest.makeSuite",
        "unittest.findTestCases",
        "webbrowser.MacOSX",
    ),
    *("typing.io", "typing.re", "re.template"),
}
REMOVED_ASSERTIONS = {
    "assertEquals",
    "assertNotEquals",
    "assertRegexpMatches",
    "assertRaisesRegexp",
    "failUnless",
}


def used(source: str) -> Iterator[str]:
    """Modules that are imported, and attributes that are read (`ssl.wrap_socket`)."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def faults(source: str) -> list[str]:
    """What of a file newer versions do not have."""
    found = set(used(source))
    assertions = {name for name in found if name.split(".")[-1] in REMOVED_ASSERTIONS}
    return sorted((found & (REMOVED_MODULES | REMOVED_NAMES)) | assertions)


def interpreter(version: str) -> str | None:
    """A Python of that version, on PATH or beside the others that pyenv has installed."""
    name = f"python{version}"
    installed = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/{name}"))
    for candidate in (shutil.which(name), *map(str, installed)):
        if (
            candidate
            and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode
            == 0
        ):
            return candidate
    return None


@pytest.mark.slow
def test_nothing_is_used_that_newer_pythons_took_out() -> None:
    files = python_files(*FOLDERS)
    assert len(files) > 500
    wrong = {
        str(path.relative_to(ROOT)): found for path in files if (found := faults(path.read_text()))
    }
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("version", NEWER)
def test_every_file_is_compiled_by_newer_pythons(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(
            f"no Python {version} here; its grammar takes all that the one of "
            f"{sys.version_info[:2]} takes"
        )
    files = python_files(*FOLDERS)
    program = (
        "import sys\n"
        "for path in sys.stdin.read().split('\\n'): compile(open(path).read(), path, 'exec')\n"
        "print(*sys.stdlib_module_names)"
    )
    command = [python, "-W", "error::SyntaxWarning", "-c", program]
    done = subprocess.run(
        command, input="\n".join(map(str, files)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    removed = sys.stdlib_module_names - set(done.stdout.split())
    assert {name for name in removed if not name.startswith("_")} <= REMOVED_MODULES


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import distutils", "distutils"),
        ("from imp import reload", "imp"),
        ("import ssl\nssl.wrap_socket(None)", "ssl.wrap_socket"),
        ("from unittest import makeSuite", "unittest.makeSuite"),
        ("self.assertEquals(1, 2)", "self.assertEquals"),
    ],
)
def test_what_was_taken_out_is_found(line: str, found: str) -> None:
    assert faults(line) == [found]
