"""Check all locks against the advisories that are known: `python -m requirements.advisories`.

`advisories.json` lists vulnerabilities of packages that a lock names or named: `affected` is a
version specifier, and `date` is that of the source. `accepted` says why a lock may keep an affected
version for which there is no fixed one; docs/security.md lists these.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).resolve().parent
FIELDS = frozenset({"id", "package", "affected", "date", "source", "meaning"})


def main() -> int:
    """Print every problem; 0 when there is none."""
    advisories: list[dict[str, Any]] = json.loads(
        (HERE / "advisories.json").read_text(encoding="utf-8")
    )
    documented = (HERE.parent / "docs" / "security.md").read_text(encoding="utf-8")
    locks = {
        path.name: list(pinned(path.read_text(encoding="utf-8")))
        for path in sorted(HERE.glob("*.txt"))
    }
    found = problems(advisories, locks, documented)
    for line in found:
        print(f"advisories: {line}", file=sys.stderr)
    print(f"advisories: {len(advisories)} known, {len(locks)} locks, {len(found)} problems")
    return 1 if found else 0


def pinned(text: str) -> Iterator[tuple[str, Version]]:
    """(name, version) of each package that a lock pins."""
    for line in text.splitlines():
        name, mark, version = line.partition("#")[0].partition(";")[0].strip().partition("==")
        if mark:
            yield canonicalize_name(name.partition("[")[0]), Version(version.split()[0])


def problems(
    advisories: Iterable[Mapping[str, Any]],
    locks: Mapping[str, Iterable[tuple[str, Version]]],
    documented: str,
) -> list[str]:
    """A line for each locked version that is affected and not accepted, and for each entry that is
    not as it should be."""
    found = []
    for one in advisories:
        if missing := FIELDS - one.keys():
            found.append(f"{one.get('id', 'an entry')} has no {', '.join(sorted(missing))}")
            continue
        affected = SpecifierSet(one["affected"], prereleases=True)
        package = canonicalize_name(one["package"])
        hit = [
            f"{lock}: {name} {at}"
            for lock, pins in locks.items()
            for name, at in pins
            if name == package and at in affected
        ]
        if hit and "accepted" not in one:
            found.append(
                f"{one['id']} ({one['source']}): {'; '.join(hit)} is affected ({one['affected']}): "
                f"{one['meaning']}"
            )
        if "accepted" in one and not hit:
            found.append(f"{one['id']} is accepted, and no lock is affected: remove `accepted`")
        if "accepted" in one and one["id"] not in documented:
            found.append(f"{one['id']} is accepted, and docs/security.md does not name it")
    return found


if __name__ == "__main__":
    sys.exit(main())
