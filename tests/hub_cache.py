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
    """What `hf download` leaves: blobs, a snapshot of links to them, and the commit that `main` stands for."""
    folder = cache / f"{kind}--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for number, (name, text) in enumerate(files.items()):
        blob, link = folder / "blobs" / f"{number:064x}", snapshot / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(text)
        link.symlink_to(blob)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_text(COMMIT)
    return snapshot


def adopt(cache: Path, repository: str, folder: Path, kind: str = "models") -> Path:
    """Move the files of a folder into a cache, where they lie as `hf download` would have left them."""
    target = cache / f"{kind}--{repository.replace('/', '--')}"
    snapshot = target / "snapshots" / COMMIT
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob, link = target / "blobs" / f"{number:064x}", snapshot / file.relative_to(folder)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        link.symlink_to(blob)
    (target / "refs").mkdir(exist_ok=True)
    (target / "refs/main").write_text(COMMIT)
    return snapshot
