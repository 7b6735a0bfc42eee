"""The repository names no machine of ours: no absolute paths of a home or work folder, no package
or container registry."""

from __future__ import annotations

import re

import pytest

from tests.arch.files import ROOT, repository_files

# A letter in brackets keeps each pattern from matching its own text here.
FORBIDDEN = [
    r"(?<![\w./~-])/(wor[k]|roo[t]|hom[e]|User[s]|op[t]|mn[t]|scratc[h])/[\w.]",
    r"\bpypi\.or[g]",
    r"pythonhoste[d]",
    r"download\.pytorch\.or[g]",
    r"\bpypi\.nvidia\.co[m]",
    r"--(extra-)?index-ur[l]",
    r"\bnvcr\.i[o]",
    r"\bghcr\.i[o]",
    r"\bquay\.i[o]",
    r"\bdocker\.i[o]",
    r"hub\.docke[r]",
    r"conda\.anacond[a]",
]


def offending(text: str) -> list[str]:
    """The forbidden pieces of `text`."""
    return [match.group(0) for pattern in FORBIDDEN for match in re.finditer(pattern, text)]


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = repository_files()
    assert ROOT / "setup.py" in files
    found = {}
    for path in files:
        if pieces := offending(path.read_text(encoding="utf-8", errors="ignore")):
            found[str(path.relative_to(ROOT))] = pieces
    assert found == {}


@pytest.mark.parametrize("text", ["see /{}/main/x.py", "'/{}/cache'", "path=/{}/a"])
@pytest.mark.parametrize("folder", ["work", "root", "home", "opt"])
def test_absolute_paths_are_seen(text: str, folder: str) -> None:
    assert offending(text.format(folder))


@pytest.mark.parametrize(
    "text",
    ["data/work/x", "a network/root/b", "./home/x", "/tmp/x", "/usr/bin/env bash", "read/opt/x"],
)
def test_relative_paths_and_system_tools_are_fine(text: str) -> None:
    assert offending(text) == []


def test_locks_are_exact_and_name_no_host() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        lines = [
            line
            for line in lock.read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#")
        ]
        assert lines, lock
        assert [
            line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)
        ] == [], lock
        assert len({line.split("==")[0].lower() for line in lines}) == len(lines), (
            f"{lock} pins a package twice"
        )


def test_the_cpu_lock_holds_no_cuda_package() -> None:
    names = re.findall(
        r"^([^#=\s]+)==",
        (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert [
        name
        for name in names
        if re.match(r"nvidia|cuda|flashinfer|sglang-kernel|torchvision|torch$", name.lower())
    ] == []
    assert {"sglang", "triton", "xgrammar", "megatron-core", "ray"} <= set(names)
