"""Locks against known vulnerabilities: an affected version is found, an accepted one is
documented."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from packaging.version import Version

from requirements.advisories import HERE, pinned, problems

ONE = {
    "id": "X-1",
    "package": "Some_Package",
    "affected": ">=1.2,<1.4",
    "date": "2026-01-01",
    "source": "s",
    "meaning": "m",
}


def found(version: str, documented: str = "", **changes: Any) -> list[str]:
    lock = (
        f"# some-package==1.3\nother==1.3\nsome.package[extra]=={version} ; python_version > '3'  "
        "# why\n"
    )
    return problems([{**ONE, **changes}], {"cpu.txt": list(pinned(lock))}, documented)


def test_affected_versions_are_found_as_packaging_compares_them() -> None:
    for version in ("1.2", "1.2.0", "1.3.post1", "1.3+cpu", "1.3rc1"):
        [line] = found(version)
        assert f"cpu.txt: some-package {Version(version)} is affected" in line, version
    for version in ("1.1.9", "1.4", "1.10"):
        assert found(version) == [], version


def test_what_is_accepted_is_documented_and_still_there() -> None:
    assert found("1.3", "names X-1", accepted="no fix") == []
    assert "docs/security.md does not name it" in found("1.3", accepted="no fix")[0]
    assert "no lock is affected" in found("1.4", "names X-1", accepted="no fix")[0]
    assert (
        "has no source"
        in problems([{key: value for key, value in ONE.items() if key != "source"}], {}, "")[0]
    )


def test_the_locks_of_this_tree_have_no_other_known_vulnerability() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "requirements.advisories"],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    known = json.loads((HERE / "advisories.json").read_text())
    assert done.stdout.startswith(f"advisories: {len(known)} known, ") and len(
        {one["id"] for one in known}
    ) == len(known)
    assert all(one["source"].startswith("https://") for one in known)
