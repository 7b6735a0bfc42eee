"""What the kernel can take from a run: the memory of one process, and the writes of one file
system."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

ROOTS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}
LEFT = 8 << 20  # bytes that a process may still take
PREFIX = "hybridflow-faults-"
SIZE_MB = 256


def can_starve() -> bool:
    """Whether this user may limit the memory of a process."""
    try:
        group = _group("try")
        group.rmdir()
    except OSError:
        return False
    return True


def starve(pid: int) -> None:
    """Let the process take a few more bytes; with the next ones the kernel kills it. What it holds
    does not count."""
    with suppress(ProcessLookupError):  # it has ended
        (_group(str(pid)) / "cgroup.procs").write_text(str(pid))


def free_groups() -> None:
    """Remove the groups of processes that have ended; those that run go back to the group of
    all."""
    for root in ROOTS:
        for group in root.glob(f"{PREFIX}*"):
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (root / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                group.rmdir()


def _group(name: str) -> Path:
    for root, limit in ROOTS.items():
        if (root / "cgroup.procs").exists():
            group = root / f"{PREFIX}{name}"
            group.mkdir(exist_ok=True)
            try:
                (group / limit).write_text(str(LEFT))
            except OSError:
                group.rmdir()
                raise
            return group
    raise FileNotFoundError("no control group of memory")


def can_make_disks() -> bool:
    """Whether this user may mount a file system of its own and let it stand still."""
    with tempfile.TemporaryDirectory() as name:
        at = Path(name, "at")
        at.mkdir()
        try:
            make_disk(Path(name, "image"), at)
            freeze(at)
            thaw(at)
        except (OSError, subprocess.CalledProcessError):
            return False
        finally:
            subprocess.run(["umount", str(at)], capture_output=True, check=False)
    return True


def make_disk(image: Path, at: Path) -> None:
    """Mount a file system of its own, which lies in `image`, at `at`."""
    with image.open("wb") as file:
        file.truncate(SIZE_MB << 20)
    for command in (
        ["mkfs.ext4", "-q", "-m", "0", str(image)],
        ["mount", "-o", "loop", str(image), str(at)],
    ):
        subprocess.run(command, capture_output=True, check=True)
    (at / "lost+found").rmdir()


def freeze(folder: Path) -> None:
    """Let writes to the file system wait. Nobody who writes can be killed until `thaw`."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)


def thaw(folder: Path) -> None:
    """Let writes go on, where they wait."""
    subprocess.run(["fsfreeze", "--unfreeze", str(folder)], capture_output=True, check=False)


def set_immutable(folder: Path, on: bool) -> None:
    """Let nobody, root included, add or remove entries of a folder and those in it; or let them
    again."""
    if not folder.is_dir():
        return
    flag = "+i" if on else "-i"
    subprocess.run(["chattr", flag, str(folder)], check=True)
    # the run may remove one of these meanwhile
    inside = [str(path) for path in folder.rglob("*") if path.is_dir()]
    subprocess.run(["chattr", flag, str(folder), *inside], check=False)
