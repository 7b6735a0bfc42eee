"""What a live run has on its machine that another user could try: folders, files, locks, sockets, shared memory and the
holders of credentials, read from /proc and the file system and from no list of our own.

`python -m tests.security.inventory PID [RUN_FOLDER]` prints the table of docs/security.md for the run whose driver is
PID.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.security.sockets import listeners, processes_of, role_of

SHARED_PLACES = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")  # where every user makes files
CODE = (str(Path(__file__).resolve().parents[2]), sys.prefix)  # of the test itself: a checkout may lie in /tmp
CREDENTIALS = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|ADMIN_KEY")
_RANDOM = (
    (r"session_\d[\w-]+", "session_*"),
    (r"(hf-(?:ray|engine)-|hf-(?:job|cluster)-)[\w-]+", r"\1*"),
    (r"[0-9a-f]{8,}", "*"),
    (r"\d+", "*"),
)


@dataclass(frozen=True, order=True)
class Edge:
    """Something of a run that has a name or an address.

    Attributes:
        kind: folder, file, lock, unix socket, tcp, shared memory or credential.
        holder: the role of a process that has it open.
        name: where it is; parts that differ from run to run are `*` after `general`.
        mode: as in `ls -l`; empty for what has none.
        others: what an unrelated user can do with it: any of list, enter, read, write, connect; empty for nothing.
    """

    kind: str
    holder: str
    name: str
    mode: str
    others: str


def general(name: str) -> str:
    """The name without what is drawn for each run."""
    for pattern, shown in _RANDOM:
        name = re.sub(pattern, shown, name)
    return name


def edges_of(processes: Sequence[psutil.Process], run_folders: Sequence[Path] = ()) -> list[Edge]:
    """All edges of the processes, sorted. `run_folders` are looked at beside the places that all users share."""
    places = (*SHARED_PLACES, *(f"{folder.resolve()}/" for folder in run_folders))
    held, locked = {}, _locks({process.pid for process in processes})
    found = []
    for process in processes:
        role = role_of(process)
        for path in _paths(process.pid, places):
            held.setdefault(_top(path, places), role)
        found += [Edge("credential", role, name, "", "") for name in _credentials(process)]
    for top, role in held.items():
        found += [_edge(path, role, locked) for path in _tree(top)]
    for one in listeners(list(processes)):
        if one.kind == "tcp" or one.address.startswith("@"):
            kind = "tcp" if one.kind == "tcp" else "abstract socket"
            found.append(Edge(kind, one.role, one.address, "", "connect"))
    return sorted(set(found))


def open_to_others(edges: Sequence[Edge]) -> list[Edge]:
    """The edges that another user can reach by a name in the file system."""
    return [edge for edge in edges if edge.others and edge.kind not in ("tcp", "abstract socket")]


def _paths(pid: int, places: Sequence[str]) -> Iterator[Path]:
    """What a process has open, mapped, or as its folder, in one of the places."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        links += [line.split(maxsplit=5)[5] for line in maps if line.count("/")]
        links.append(os.readlink(f"/proc/{pid}/cwd"))
        unix = {fields[6]: fields[7] for fields in _unix_sockets()}
        links += [unix[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in unix]
    except OSError:
        return  # it has ended
    for link in links:
        if link.startswith(tuple(places)) and not link.startswith(CODE) and os.path.exists(link):
            yield Path(link)


def _unix_sockets() -> Iterator[list[str]]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        if len(fields := line.split(maxsplit=7)) == 8:
            yield fields


def _top(path: Path, places: Sequence[str]) -> Path:
    """The entry of the place that the path is in; the place itself for a run folder."""
    place = max((place for place in places if f"{path}/".startswith(place)), key=len)
    if place not in SHARED_PLACES:
        return Path(place)
    return Path(place) / path.relative_to(place).parts[0]


def _tree(top: Path) -> Iterator[Path]:
    yield top
    if top.is_dir() and not top.is_symlink():
        for folder, folders, files in os.walk(top):
            yield from (Path(folder, name) for name in (*folders, *files))


def _edge(path: Path, role: str, locked: set[tuple[int, int]]) -> Edge:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return Edge("file", role, str(path), "", "")  # it has gone meanwhile
    kind = "folder" if stat.S_ISDIR(status.st_mode) else "unix socket" if stat.S_ISSOCK(status.st_mode) else "file"
    if kind == "file" and str(path).startswith("/dev/shm/"):
        kind = "shared memory"
    if (status.st_dev, status.st_ino) in locked:
        kind = "lock"
    return Edge(kind, role, str(path), stat.filemode(status.st_mode), _others(path, status))


def _others(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode) or not all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents):
        return ""
    may = {bit for bit in (stat.S_IROTH, stat.S_IWOTH, stat.S_IXOTH) if status.st_mode & bit}
    if stat.S_ISDIR(status.st_mode):
        words = {stat.S_IROTH: "list", stat.S_IWOTH: "write", stat.S_IXOTH: "enter"}
    elif stat.S_ISSOCK(status.st_mode):
        words = {stat.S_IWOTH: "connect"}
    else:
        words = {stat.S_IROTH: "read", stat.S_IWOTH: "write"}
    return ", ".join(word for bit, word in words.items() if bit in may)


def _locks(pids: set[int]) -> set[tuple[int, int]]:
    """Device and inode of the files that the processes have locked."""
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and int(fields[4]) in pids:
            major, minor, inode = fields[5].split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def _credentials(process: psutil.Process) -> list[str]:
    try:
        return [name for name in process.environ() if CREDENTIALS.search(name)]
    except psutil.Error:
        return []  # it has ended


def table(edges: Sequence[Edge]) -> str:
    """Rows of docs/security.md: one for each kind of edge and holder."""
    rows = sorted({(edge.kind, edge.holder, general(edge.name), edge.mode, edge.others or "nothing") for edge in edges})
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(edges_of(processes_of(int(sys.argv[1])), [Path(word) for word in sys.argv[2:]])))
