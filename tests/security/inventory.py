"""What a live run has on its machine that another user could try: folders, files, locks, sockets,
shared memory and the holders of credentials, read from /proc and the file system and from no list
of our own.

`python -m tests.security.inventory PID... [--run FOLDER]` prints the rows of docs/security.md for
these processes and all that descend from them, and what is wrong; with `--json` the whole
inventory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.security import leaks, unasked
from tests.security.sockets import Listener, listeners, processes_of, role_of

SHARED_PLACES = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")  # where every user makes files
# of the test itself: a checkout may lie in /tmp
CODE = (str(Path(__file__).resolve().parents[2]), sys.prefix)
# who may listen for other machines and show no guard, and why
UNPROVEN = {
    "worker": "gloo: docs/security.md, What is left",
    "engine rank": "gloo: docs/security.md, What is left",
    "Slurm srun": "Slurm's own protocol, which asks for a credential of munge's",
}
_RANDOM = (
    (r"session_\d[\w-]+", "session_*"),
    (r"(hf-(?:ray|engine)-|hf-(?:job|cluster)-)[\w-]+", r"\1*"),
    (r"(?<=hft-)[\w-]+|[0-9a-f]{8,}|\d+", "*"),
)


@dataclass(frozen=True, order=True)
class Edge:
    """Something of a run that has a name or an address.

    Attributes:
        kind: folder, file, lock, unix socket, abstract socket, tcp, shared memory or credential.
        holder: the role of the process that has it; of folders and files what most processes with
            them open are.
        name: where it is.
        mode: as in `ls -l`; empty for what has none.
        others: what an unrelated user can do with it: any of list, enter, read, write, connect; of
            a TCP listener what it answers to somebody without a key; empty for nothing.
        is_of_run: whether it is in a folder that the user has named for the run's results.
    """

    kind: str
    holder: str
    name: str
    mode: str
    others: str
    is_of_run: bool = False


@dataclass(frozen=True)
class Inventory:
    """The edges of a run, sorted, and what is wrong with them, in words."""

    edges: tuple[Edge, ...]
    faults: tuple[str, ...]


def take(processes: Sequence[psutil.Process], run_folders: Sequence[Path] = ()) -> Inventory:
    """The inventory of the processes of a run, however it was started. Its TCP listeners are asked
    what they answer."""
    edges = edges_of(processes, run_folders)
    faults = [fault for edge in edges if (fault := _fault(edge))]
    return Inventory(
        tuple(edges), (*faults, *leaks.found(processes, [edge.name for edge in edges]))
    )


def edges_of(processes: Sequence[psutil.Process], run_folders: Sequence[Path] = ()) -> list[Edge]:
    """All edges of the processes, sorted. `run_folders` are looked at beside the places that all
    users share."""
    runs = tuple(f"{folder.resolve()}/" for folder in run_folders)
    places = (*SHARED_PLACES, *_temporary(processes), *runs)
    roles = {process.pid: role for process in processes if (role := role_of(process)) != "ended"}
    held: dict[Path, Counter[str]] = {}
    for pid, role in roles.items():
        for top in {_top(path, places, runs) for path in _paths(pid, places)}:
            held.setdefault(top, Counter())[role.split()[0]] += 1
    listening = listeners(list(processes))
    locked = _locks(roles)
    found = [
        _edge(
            path, min(held[top], key=lambda role: (-held[top][role], role)), locked, runs, listening
        )
        for top in held
        for path in _tree(top)
    ]
    found += [
        Edge("credential", roles[one.pid], name, "", "")
        for one in processes
        if one.pid in roles
        for name in leaks.names(one)
    ]
    told = unasked.answers(one.address for one in listening if one.kind == "tcp")
    for one in listening:
        if one.kind == "tcp" or one.address.startswith("@"):
            kind = "tcp" if one.kind == "tcp" else "abstract socket"
            found.append(Edge(kind, one.role, one.address, "", told.get(one.address, "connect")))
    return sorted(set(found))


def _fault(edge: Edge) -> str:
    """What is wrong with an edge; empty when another user gets nothing of it."""
    if edge.kind == "tcp":
        if edge.others.startswith(unasked.OPEN):
            return (
                f"{edge.holder} listens at {edge.name} and answers somebody without a key: "
                f"{edge.others}"
            )
        is_elsewhere = _where(edge.name) != "loopback" and edge.holder not in UNPROVEN
        if edge.others == unasked.SILENCE and is_elsewhere:
            return (
                f"{edge.holder} listens at {edge.name}, for other machines too, and shows no guard"
            )
        return ""
    if edge.kind in ("abstract socket", "credential") or not edge.others:
        return ""  # an abstract socket has no mode: `unasked` cannot tell, tests of its server do
    if edge.is_of_run and edge.kind != "lock" and "write" not in edge.others:
        return ""  # results have the user's umask
    return (
        f"{edge.kind} {edge.name} of {edge.holder} has the mode {edge.mode}: others can "
        f"{edge.others}"
    )


def _temporary(processes: Sequence[psutil.Process]) -> Iterator[str]:
    """Folders for temporary files that the processes share with all users."""
    for process in processes:
        folder = leaks.environment(process).get("TMPDIR", "")
        if folder and os.path.isdir(folder) and os.stat(folder).st_mode & stat.S_ISVTX:
            yield f"{os.path.realpath(folder)}/"


def _paths(pid: int, places: Sequence[str]) -> Iterator[Path]:
    """What a process has open, mapped, as its folder or in its command line, in one of the
    places."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        links += [line.split(maxsplit=5)[5] for line in maps if line.count("/")]
        links.append(os.readlink(f"/proc/{pid}/cwd"))
        # a title that a process has given itself has blanks between its words
        links += re.findall(r"(?<=[\0 ])/[^\0 ]+", Path(f"/proc/{pid}/cmdline").read_text())
        unix = {fields[6]: fields[7] for fields in _unix_sockets()}
        links += [
            unix[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in unix
        ]
    except OSError:
        return  # it has ended
    for link in links:
        if (
            f"{link}/".startswith(tuple(places))
            and not link.startswith(CODE)
            and os.path.exists(link)
        ):
            yield Path(link)


def _unix_sockets() -> Iterator[list[str]]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        if len(fields := line.split(maxsplit=7)) == 8:
            yield fields


def _top(path: Path, places: Sequence[str], runs: Sequence[str]) -> Path:
    """The entry of the place that the path is in; the place itself for a run folder."""
    place = max((place for place in places if f"{path}/".startswith(place)), key=len)
    parts = path.relative_to(place).parts
    return Path(place) if place in runs or not parts else Path(place) / parts[0]


def _tree(top: Path) -> Iterator[Path]:
    yield top
    if top.is_dir() and not top.is_symlink() and f"{top}/" not in SHARED_PLACES:
        for folder, folders, files in os.walk(top):
            yield from (Path(folder, name) for name in (*folders, *files))


def _edge(
    path: Path,
    role: str,
    locked: dict[tuple[int, int], str],
    runs: tuple[str, ...],
    listening: Sequence[Listener],
) -> Edge:
    is_of_run = f"{path}/".startswith(runs) if runs else False
    try:
        status = path.lstat()
    except FileNotFoundError:
        return Edge("file", role, str(path), "", "", is_of_run)  # it has gone meanwhile
    kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
    if stat.S_ISSOCK(status.st_mode):
        kind = "unix socket"
        role = next((one.role for one in listening if one.address == str(path)), role)
    elif kind == "file" and str(path).startswith("/dev/shm/"):
        kind = "shared memory"
    if (locker := locked.get((status.st_dev, status.st_ino))) is not None:
        kind = "lock"
        role = locker
    return Edge(
        kind, role, str(path), stat.filemode(status.st_mode), _others(path, status), is_of_run
    )


def _others(path: Path, status: os.stat_result) -> str:
    """What another user may do; the folders above must let them pass, and a sticky one is nobody's
    to change."""
    if stat.S_ISLNK(status.st_mode) or not all(
        parent.stat().st_mode & stat.S_IXOTH for parent in path.parents
    ):
        return ""
    may = {bit for bit in (stat.S_IROTH, stat.S_IWOTH, stat.S_IXOTH) if status.st_mode & bit}
    if stat.S_ISDIR(status.st_mode):
        words = {stat.S_IROTH: "list", stat.S_IWOTH: "write", stat.S_IXOTH: "enter"}
    elif stat.S_ISSOCK(status.st_mode):
        words = {stat.S_IWOTH: "connect"}
    else:
        words = {stat.S_IROTH: "read", stat.S_IWOTH: "write"}
    return ", ".join(word for bit, word in words.items() if bit in may)


def _locks(roles: Mapping[int, str]) -> dict[tuple[int, int], str]:
    """Device and inode of the files that the processes have locked, and who has."""
    found = {}
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and int(fields[4]) in roles:
            major, minor, inode = fields[5].split(":")
            found[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = roles[int(fields[4])]
    return found


# ---- the table of docs/security.md


def general(name: str) -> str:
    """The name without what is drawn for each run."""
    for pattern, shown in _RANDOM:
        name = re.sub(pattern, shown, name)
    return name


def rows(edges: Sequence[Edge]) -> list[tuple[str, ...]]:
    """(kind, process, where, mode, what others get) of each kind of edge; a closed folder stands
    for what is in it."""
    closed = [f"{edge.name}/" for edge in edges if edge.kind == "folder" and not edge.others]
    found = set()
    for edge in edges:
        inside = min(
            (folder for folder in closed if edge.name.startswith(folder)), key=len, default=""
        )
        if edge.kind == "tcp":
            where = _where(edge.name)
            mode = ""
            others = edge.others
        elif inside and edge.kind in ("file", "folder"):
            continue
        elif inside:
            where = f"in {general(Path(inside).name)}"
            mode = ""
            others = "nothing"
        else:
            where = (
                "output folder"
                if edge.is_of_run
                else general(edge.name.rpartition("/")[2] or edge.name)
            )
            mode = edge.mode if edge.kind != "credential" else "environment"
            others = edge.others or "nothing"
        if not edge.is_of_run or edge.kind == "lock":
            found.add((edge.kind, edge.holder, where, mode, others))
    return sorted(found)


def _where(address: str) -> str:
    host = address.rpartition(":")[0].removeprefix("::ffff:")
    return (
        "loopback"
        if re.match(r"127\.|::1$", host)
        else "every address"
        if host in ("0.0.0.0", "::")
        else "node"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The inventory of a live run.", allow_abbrev=False)
    parser.add_argument("pids", nargs="+", type=int)
    parser.add_argument("--run", action="append", default=[], type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    taken = take([process for pid in given.pids for process in processes_of(pid)], given.run)
    if given.json:
        print(json.dumps(asdict(taken)))
    else:
        print("\n".join(f"| {' | '.join(row)} |" for row in rows(taken.edges)))
        print("\n".join(taken.faults), file=sys.stderr)
    sys.exit(bool(taken.faults))
