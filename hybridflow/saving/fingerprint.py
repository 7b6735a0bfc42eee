"""The fingerprint of a run: the inputs that determine its results, i.e. its settings, the contents
of the files that they name, the tokenizer and the packages. It is stored in checkpoints, so that a
resumed run can report differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from hybridflow.config.registry import is_user_entry
from hybridflow.config.schema import RunConfig

# the run's location, and settings for resuming
_INCIDENTAL = ("name", "output_dir", "trainer.resume", "trainer.resume_with_other_data")
# the training data of each checkpoint phase
TRAINED_ON: Mapping[str, str] = {
    "sft": "sft.train_files",
    "rl": "data.train_files",
    "reward": "reward_training.train_files",
}
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Fingerprint:
    """A run's fingerprint, JSON-serializable for `driver.json`.

    Attributes:
        settings: values keyed by dotted key, except settings that name a file in `files`.
        files: (name, xxh3 of the content) for each file, keyed by the setting that names it.
        tokens: digests of the vocabulary and of the chat template.
        packages: package versions.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: RunConfig, tokens: Mapping[str, str], packages: Mapping[str, str]
    ) -> Fingerprint:
        """Compute the fingerprint. Reads every file that the settings name: data files and custom
        code.

        Raises:
            OSError: a file cannot be read.
        """
        settings = {}
        for key, value in _flat(asdict(config)):
            if key not in _INCIDENTAL:
                settings[key] = value
        files = {}
        for key, paths in _named(settings):
            files[key] = [[str(path), _digest(path)] for path in paths]
        kept = {}
        for key, value in settings.items():
            if not (key in files and key.endswith("_files")):
                kept[key] = value
        return cls(json.loads(json.dumps(kept)), files, dict(tokens), dict(packages))

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Fingerprint:
        """Rebuild a fingerprint from the result of `asdict`. For a checkpoint written before
        fingerprints existed, it is empty. Raises ValueError if the value is malformed.
        """
        found = {}
        for name in cls.__dataclass_fields__:
            if name in value:
                found[name] = value[name]
        if not all(isinstance(one, dict) for one in found.values()):
            raise ValueError("the fingerprint's values must be objects")
        for files in found.get("files", {}).values():
            if not all(isinstance(word, str) for word in chain.from_iterable(files)):
                raise ValueError("the fingerprint's files must be lists of names and digests")
        return cls(**found)

    def changes(self, before: Fingerprint) -> list[str]:
        """Return one line per difference from `before`; an empty list if `before` is empty."""
        if not before.settings:
            return []
        found = []
        for key in sorted(self.files.keys() & before.files.keys()):
            files = self.files[key]
            files_before = before.files[key]
            if _contents(files) != _contents(files_before):
                names = _names(files, files_before)
                found.append(f"{key} has changed since the checkpoint was saved: {names}")
        for what, now, then in (
            ("", self.settings, before.settings),
            ("the tokenizer's ", self.tokens, before.tokens),
            ("package ", self.packages, before.packages),
        ):
            for key in sorted(now.keys() | then.keys()):
                if key in self.files and key.endswith("_files"):
                    continue
                if now.get(key) != then.get(key):
                    old = _shown(then, key)
                    new = _shown(now, key)
                    found.append(
                        f"{what}{key} was {old} when the checkpoint was saved, but is {new} now"
                    )
        return found

    def has_other_data(self, before: Fingerprint, phase: str) -> bool:
        """Return True if the checkpoint's phase was trained on different data files than this run
        would use.
        """
        key = TRAINED_ON[phase]
        if key not in before.files:
            return False
        return _contents(self.files.get(key, ())) != _contents(before.files[key])


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in value.items():
        if isinstance(one, Mapping) and one:
            yield from _flat(one, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", one


def _named(settings: Mapping[str, Any]) -> Iterator[tuple[str, list[Path]]]:
    """Yield each setting that names data files or custom code, together with the files that
    exist."""
    for key, value in settings.items():
        words = []
        for word in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(word, str):
                continue
            if key.endswith("_files"):
                words.append(word)
            elif ".py" in word:
                words.append(word.rpartition(":")[0] if is_user_entry(word) else word)
        paths = list(filter(Path.is_file, map(Path, words)))
        if paths:
            yield key, paths


def _digest(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            found.update(block)
    return str(found.hexdigest())


def _contents(files: Sequence[Sequence[str]]) -> list[str]:
    return [digest for _, digest in files]


def _names(now: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> str:
    if len(now) != len(before):
        return f"{len(before)} files then, {len(now)} now"
    known = set(_contents(before))
    other = [name for name, digest in now if digest not in known]
    return ", ".join(other[:3]) or "the same files in a different order"


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "absent"
    text = json.dumps(values[key])
    return text if len(text) <= 80 else f"{text[:77]}..."
