"""Support for passing Python objects instead of paths: training rows, a reward function or a flow.
Each object is written to a content-addressed file next to the run folder.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hybridflow.api.settings import text
from hybridflow.config.entries import FLOWS, Flow
from hybridflow.config.registry import offer
from hybridflow.errors import ConfigError

# resolved by the loader
FOLDER = "${output_dir}/${name}.given"
HELD_OUT = ("test", "validation", "val")
PARTS = ("train", *HELD_OUT)
_STUB = '''\
"""The {what} `{name}`, which a Python program passed to hybridflow.Run as an object.

It exists only in that program: {where}.
"""

raise ImportError("this {what} was passed as an object by a Python program; run that program again")

{source}
'''


@runtime_checkable
class _Table(Protocol):
    """A table that can write itself to parquet, such as a `datasets.Dataset` or a
    `pandas.DataFrame`.
    """

    def to_parquet(self, path: str, /) -> Any:
        """Write the rows."""


@dataclass
class Given:
    """Collects the Python objects passed to a run, and writes them to files.

    Attributes:
        words: command-line settings that point to these files.
    """

    words: list[str] = field(default_factory=list)
    _rows: dict[str, Path] = field(default_factory=dict)  # {file name: temporary file}
    _texts: dict[str, str] = field(default_factory=dict)
    _functions: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add_data(self, data: Any, scratch: Path) -> None:
        """Add training rows, or a mapping with `train` and `test` (or `validation`).

        Args:
            scratch: a folder that stores the rows until `write` is called.

        Raises:
            ConfigError: the data is neither paths nor rows.
        """
        splits = data if isinstance(data, Mapping) else {"train": data}
        held_out = [name for name in HELD_OUT if name in splits]
        if "train" not in splits or len(held_out) > 1:
            raise ConfigError(
                "data must contain train, and may contain test (held-out prompts); got "
                f"{', '.join(map(repr, splits)) or 'none'}"
            )
        self._add_files("data.train_files", splits["train"], scratch)
        if held_out:
            self._add_files("data.val_files", splits[held_out[0]], scratch)
        else:
            self.words.append("data.val_files=[]")

    def _add_files(self, key: str, rows: Any, scratch: Path) -> None:
        paths = [rows] if isinstance(rows, str | Path) else rows
        is_list = isinstance(paths, list | tuple) and len(paths) > 0
        if is_list and all(isinstance(one, str | Path) for one in paths):
            self.words.append(f"{key}={text(list(paths), key)}")
            return
        written = _written(key, rows, scratch)
        digest = hashlib.sha256(written.read_bytes()).hexdigest()[:16]
        name = f"{key.partition('.')[2].removesuffix('_files')}-{digest}.parquet"
        self._rows[name] = written
        self.words.append(f'{key}=["{FOLDER}/{name}"]')

    def add_reward(self, reward: Any) -> None:
        """Add a reward, given as a function or as `path/to/file.py:name`."""
        if callable(reward):
            name, file = self._add_function("reward function", reward)
            self.words += [f'reward.path="{FOLDER}/{file}"', f"reward.name={name}"]
            return
        path, _, name = str(reward).rpartition(":")
        if not path or "/" in name:
            path, name = str(reward), "compute_score"
        self.words += [
            f"reward.path={text(path, 'reward.path')}",
            f"reward.name={text(name, 'reward.name')}",
        ]

    def add_flow(self, flow: Any) -> None:
        """Add a flow, given as a function decorated with `flow`, the name of a built-in flow, or
        `path/to/file.py:name`."""
        if not callable(flow):
            self.words.append(f"algorithm.flow={text(flow, 'algorithm.flow')}")
            return
        entry = next((one for one in FLOWS.registered() if one.body is flow), None)
        if entry is None:
            raise ConfigError(
                f"flow={_name(flow)} is not a flow; decorate the function with "
                '@hybridflow.flow("NAME", roles=("policy", ...))'
            )
        name, file = self._add_function("flow", flow, entry)
        self.words.append(f'algorithm.flow="{FOLDER}/{file}:{name}"')

    def _add_function(self, what: str, function: Any, entry: Any = None) -> tuple[str, str]:
        """Add a file for a function. Returns the name of the function and the name of the file."""
        name = _name(function)
        source, where = _source(function)
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        file = f"{what.partition(' ')[0]}-{digest}.py"
        shown = textwrap.indent(source, "# ", lambda line: True)
        self._texts[file] = _STUB.format(what=what, name=name, where=where, source=shown)
        self._functions[file] = (name, function if entry is None else entry)
        return name, file

    def write(self, folder: Path) -> None:
        """Write the files to `folder`, the path that `FOLDER` resolves to in the run's
        configuration.
        """
        for name, rows in self._rows.items():
            _place(folder, name, partial(shutil.copyfile, rows))
        for name, stub in self._texts.items():
            _place(folder, name, partial(_write_text, stub))
        self.offer(folder)

    def offer(self, folder: Path) -> None:
        """Register the functions in this process under their file names."""
        for file, (name, function) in self._functions.items():
            path = folder / file
            if isinstance(function, Flow):
                FLOWS.register(f"{path.resolve()}:{name}", function)
            offer(path, **{name: function})


def _place(folder: Path, name: str, write: Callable[[str], Any]) -> None:
    """Write the file `name` to `folder` atomically, unless it already exists."""
    if (folder / name).exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        os.close(descriptor)
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / name)
    except OSError as error:
        raise ConfigError(
            f"could not write {folder / name} ({error.strerror}); choose another output_dir"
        ) from error


def _write_text(content: str, path: str) -> None:
    Path(path).write_text(content, encoding="utf-8")


def _written(key: str, rows: Any, scratch: Path) -> Path:
    """Write the rows to a parquet file and return its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = scratch / key
    if isinstance(rows, _Table):
        rows.to_parquet(str(path))
        return path
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Sequence):
        raise ConfigError(
            f"{key} must be a path, a list of rows (dictionaries), or a table with to_parquet (a "
            f"datasets.Dataset, a DataFrame); got {type(rows).__name__}"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{key}, row {number}: expected a dictionary, found {row!r:.80}")
    if not rows:
        raise ConfigError(f"{key} must contain at least one row")
    try:
        pq.write_table(pa.Table.from_pylist(list(map(dict, rows))), path)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: could not convert the rows to a table ({_reason(rows, error)}); all values of "
            "a column must have the same type"
        ) from error
    return path


def _reason(rows: Sequence[Mapping[str, Any]], error: Exception) -> str:
    """Return the name of the first column that cannot be converted, and the reason."""
    import pyarrow as pa

    for name in dict.fromkeys(chain.from_iterable(rows)):
        try:
            pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, TypeError, ValueError) as own:
            return f"column {name!r}: {own}"
    return str(error)


def _name(function: Any) -> str:
    found = getattr(function, "__name__", "")
    return found if isinstance(found, str) and found.isidentifier() else "given"


def _source(function: Any) -> tuple[str, str]:
    """Return a function's source (or its bytecode if the source is unavailable) and its
    location."""
    inner = inspect.unwrap(function)
    while isinstance(inner, partial):
        inner = inner.func
    if not inspect.isroutine(inner):
        inner = type(inner)
    try:
        lines, number = inspect.getsourcelines(inner)
        return textwrap.dedent("".join(lines)), f"{inspect.getsourcefile(inner)}, line {number}"
    except (OSError, TypeError):
        code = getattr(inner, "__code__", None)
        return "\n".join(_instructions(code)) or repr(type(inner)), "its source is unknown"


def _instructions(code: Any) -> Iterator[str]:
    """Yield a text representation of the code that does not depend on memory addresses."""
    if code is None:
        return
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _instructions(constant)
        else:
            yield repr(constant)
