"""Credentials of a run, taken from its processes and private files, and where they can be read by
who should not."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|ADMIN_KEY")
# a line of a file that is its owner's alone: the name of a credential, and its value
_LINE = re.compile(
    rb"(?im)^\s*[\"']?[\w-]*(?:token|secret|password|key)[\"']?\s*:\s*[\"']?([\w+/=-]{16,})[\"']?,?\s*$"
)
_WHOLE = re.compile(rb"\s*([\w+/=-]{32,})\s*")  # a file that is nothing but one
# bytes of a file that may hold credentials, and of one that may have leaked them
_SMALL = 64 << 10
_LARGE = 32 << 20


def environment(process: psutil.Process) -> dict[str, str]:
    """What the process was started with; empty when it has ended."""
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def names(process: psutil.Process) -> list[str]:
    """The variables of a process that hold credentials, or name a file that does."""
    found = environment(process)
    return [name for name, value in found.items() if _NAMES.search(name) and len(value) >= 16]


def values(processes: Sequence[psutil.Process], files: Sequence[str]) -> set[bytes]:
    """The credentials: in the environment, in files that it names, and in `files` that only their
    owner can read."""
    found = set()
    named = []
    for process in processes:
        held = environment(process)
        for name in names(process):
            if os.path.isabs(held[name]):
                named.append(held[name])
            else:
                found.add(held[name].encode())
    for path in {*files, *named}:
        if (text := _content(path, _SMALL, stat.S_IRUSR)) is not None:
            found |= set(_LINE.findall(text)) | (
                {whole[1]} if (whole := _WHOLE.fullmatch(text)) else set()
            )
    return found


def found(processes: Sequence[psutil.Process], files: Sequence[str]) -> Iterator[str]:
    """What is wrong: a credential in a command line or in a file that others can read, or a process
    of another user that holds one or belongs to the run."""
    known = values(processes, files)
    pids = {process.pid for process in processes}
    for process in psutil.process_iter():
        try:
            words = b"\0".join(os.fsencode(word) for word in process.cmdline())
            uid = process.uids().real
        except psutil.Error:
            continue  # it has ended
        if any(value in words for value in known):
            yield f"process {process.pid} has a credential in its command line"
        held = (
            {os.fsencode(value) for value in environment(process).values()}
            if uid != os.getuid()
            else set()
        )
        if uid != os.getuid() and (process.pid in pids or held & known):
            yield f"process {process.pid} of the user {uid} has credentials of the run"
    for path in files:
        text = _content(path, _LARGE, stat.S_IROTH)
        if text and any(value in text for value in known):
            yield f"the file {path} holds a credential, and others can read it"


def _content(path: str, most: int, needed: int) -> bytes | None:
    """The content of a regular file: for S_IROTH of one that others can reach and read, for S_IRUSR
    of any other."""
    try:
        status = os.lstat(path)
        is_public = bool(status.st_mode & stat.S_IROTH)
        is_public = is_public and all(
            parent.stat().st_mode & stat.S_IXOTH for parent in Path(path).parents
        )
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_size > most
            or is_public != (needed == stat.S_IROTH)
        ):
            return None
        return Path(path).read_bytes()
    except OSError:
        return None  # it has gone meanwhile
