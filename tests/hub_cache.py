"""A Hugging Face cache as `hf download` leaves it, for tests that name hub ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_cache(folder: Path) -> Iterator[Path]:
    """An empty cache below `folder`, where the library looks for its own."""
    cache = folder / "cache with a space"
    cache.mkdir()
    with patch("huggingface_hub.constants.HF_HUB_CACHE", str(cache)):
        yield cache


def download(cache: Path, repository: str, files: dict[str, str], kind: str = "models") -> Path:
    """Write files into a cache as `hf download` would; returns the snapshot."""
    snapshot, blobs = _snapshot(cache, repository, list(files), kind)
    for blob, text in zip(blobs, files.values(), strict=True):
        blob.write_text(text)
    return snapshot


def adopt(cache: Path, repository: str, folder: Path, kind: str = "models") -> Path:
    """Move the files of a folder into a cache, as `hf download` would have stored them; returns the
    snapshot."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    snapshot, blobs = _snapshot(
        cache, repository, [str(file.relative_to(folder)) for file in files], kind
    )
    for blob, file in zip(blobs, files, strict=True):
        file.rename(blob)
    return snapshot


def _snapshot(cache: Path, repository: str, names: list[str], kind: str) -> tuple[Path, list[Path]]:
    """Create a snapshot of links and the commit that `main` refers to; returns it and the blobs,
    which the caller creates."""
    folder = cache / f"{kind}--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    blobs = [folder / "blobs" / f"{number:064x}" for number in range(len(names))]
    for blob, name in zip(blobs, names, strict=True):
        link = snapshot / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_text(COMMIT)
    return snapshot, blobs
