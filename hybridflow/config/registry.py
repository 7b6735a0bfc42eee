"""Registries of the entries that a configuration selects by name: estimators, losses, transports,
rewards and custom code.

A built-in entry is a module with the same name in the registry's package. Listing the names
requires no imports, so `--help` and the loader do not need torch. A custom entry is written
`path/to/file.py:name`. There is no other list of entries. An entry declares its requirements where
it is registered.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

from hybridflow.errors import ConfigError, HybridFlowError, did_you_mean

T = TypeVar("T")
F = TypeVar("F")
_import_lock = threading.RLock()
_imported: dict[str, tuple[Path, object]] = {}  # by module: the user's file, and its state then
_USER_MODULE = "hybridflow_user_"
_OFFERED = "__hybridflow_offered__"


class Registry(Generic[T]):
    """Looks up entries of one kind by name.

    Args:
        kind: description of an entry in messages, for example "policy loss".
        package: dotted name of the package whose modules are the built-in entries; `base` and
            modules with a leading underscore are not entries.
        key: the configuration key that selects an entry, for messages.
        packages: True if entries are subpackages of `package` instead of modules; each is
            registered by its module `engine`.
    """

    def __init__(self, kind: str, package: str, key: str, *, packages: bool = False) -> None:
        self.kind = kind
        self.package = package
        self.key = key
        self._packages = packages
        self._entries: dict[str, T] = {}
        # {user entry: (globals of the import that registered it, line)}
        self._places: dict[str, tuple[dict[str, Any], int]] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry under `name`, and return it. Entries registered by a user file are
        namespaced by its path and never shadow built-ins.

        Raises:
            ConfigError: the user file has already registered this name; the message names the line.
        """
        frame = self._importing_frame()
        if frame is not None:
            name = f"{frame.f_globals['__file__']}:{name}"
            module, line = self._places.get(name, (None, 0))
            if module is frame.f_globals:  # and not of an earlier import of the file that failed
                raise ConfigError(
                    f"the {self.kind} {name.rpartition(':')[2]!r} is already registered on line "
                    f"{line}; rename one of the two"
                )
            self._places[name] = (frame.f_globals, frame.f_lineno)
        self._entries[name] = entry
        return entry

    def entry(self, name: str, made: Callable[[Any], T]) -> Callable[[F], F]:
        """Return a decorator that registers `made(function or class)` under `name` and returns the
        function or class unchanged."""

        def registered(found: F) -> F:
            self.register(name, made(found))
            return found

        return registered

    def registered(self) -> tuple[T, ...]:
        """Return all entries registered in this process."""
        return tuple(self._entries.values())

    def _importing_frame(self) -> FrameType | None:
        """Return the frame of the user file that is registering an entry during its import; None
        for a built-in entry, even if a user file imports it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "<module>":
                module = str(frame.f_globals.get("__name__"))
                if module.startswith(f"{self.package}."):
                    return None
                if module.startswith(_USER_MODULE):
                    return frame
            frame = frame.f_back
        return None

    def names(self) -> tuple[str, ...]:
        """Return the sorted names of all entries: the built-in ones in the package's folder, and
        those registered at run time.
        """
        found = {name for name in self._entries if not is_user_entry(name)}
        files = package_folder(self.package).glob("*/__init__.py" if self._packages else "*.py")
        for path in files:
            stem = path.parent.name if self._packages else path.stem
            if not stem.startswith("_") and stem != "base":
                found.add(stem)
        return tuple(sorted(found))

    def get(self, name: str) -> T:
        """Return the built-in entry `name`, or the entry in a user file (`path/to/file.py:name`).

        Raises:
            ConfigError: there is no such entry (the message suggests the nearest name), the file
                cannot be imported, or it does not register the entry.
        """
        if is_user_entry(name):
            return self._of_file(name)
        if name in self._entries:
            return self._entries[name]
        if name not in self.names():
            near = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{self.key}={name}: unknown {self.kind}{hint} (choose one of "
                f"{', '.join(self.names())}, or path/to/file.py:name)"
            )
        importlib.import_module(f"{self.package}.{name}{'.engine' if self._packages else ''}")
        assert name in self._entries, (
            f"{self.package}.{name} does not register the {self.kind} {name!r}"
        )
        return self._entries[name]

    def _of_file(self, name: str) -> T:
        import_file(Path(name.rpartition(":")[0]), self.key)
        path, _, attribute = absolute_entry(name).rpartition(":")
        if f"{path}:{attribute}" not in self._entries:
            names = []
            for key in self._entries:
                if key.startswith(f"{path}:"):
                    names.append(key.rpartition(":")[2])
            own = sorted(names)
            raise ConfigError(
                f"{self.key}={name}: {path} does not register the {self.kind} {attribute!r}; it "
                f"registers: {', '.join(own) or 'none'}"
            )
        return self._entries[f"{path}:{attribute}"]


def package_folder(package: str) -> Path:
    """Return the folder of a package, without importing its parent packages."""
    root, *below = package.split(".")
    found = importlib.util.find_spec(root)
    assert found is not None and found.submodule_search_locations, package
    return Path(found.submodule_search_locations[0], *below)


def is_user_entry(name: str) -> bool:
    """Return True if `name` refers to an entry in a user file: `path/to/file.py:name`."""
    return ".py:" in name


def absolute_entry(name: str) -> str:
    """If `name` is a user entry, make its path absolute, so that it is valid in a process with a
    different working directory."""
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).resolve()}:{attribute}" if is_user_entry(name) else name


def import_file(path: Path, key: str) -> ModuleType:
    """Import a user's Python file as a separate module.

    Its module name contains a hash of the path, so files with the same name do not clash. A file is
    executed once per process.

    Raises:
        ConfigError: the file does not exist or fails to import; the message contains `key`, the
            file and the line.
    """
    if path.suffix != ".py":
        raise ConfigError(f"{key}: {str(path)!r} is not a Python file (its name must end in .py)")
    if not path.is_file():
        raise ConfigError(f"{key}: file {str(path)!r} not found (looked in {Path.cwd()})")
    path = path.resolve()
    name = _module_name(path)
    with _import_lock:  # a second thread must not see a half-executed module
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # dataclasses and pickling in the user's file look up their module here
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            sys.modules.pop(name, None)
            hint = ""
            if isinstance(error, ImportError) and path.with_name(f"{error.name}.py").is_file():
                hint = f"; {error.name}.py is in the same folder; set PYTHONPATH={path.parent}"
            raise ConfigError(
                f"{path} ({key}) could not be imported: {describe_error(error, path)}{hint}"
            ) from error
        _imported[name] = path, _state(path)
    return module


def forget_edited_files() -> None:
    """Forget user files that were edited since their import, so that the next run in the same
    process (such as a notebook) re-executes them."""
    with _import_lock:
        for name, (path, state) in list(_imported.items()):
            if _state(path) != state:
                del _imported[name]
                sys.modules.pop(name, None)


def _state(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _module_name(path: Path) -> str:
    return f"{_USER_MODULE}{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"


def offer(path: Path, **objects: Any) -> None:
    """Make `import_file(path)` return a module that contains these objects, instead of executing
    the file. Applies to this process and its forks.
    """
    module = ModuleType(_module_name(path))
    module.__file__ = str(path.resolve())
    vars(module).update(objects, **{_OFFERED: True})
    sys.modules[module.__name__] = module


def is_offered(path: Path) -> bool:
    """Return True if `offer` was called for this file in this process."""
    return hasattr(sys.modules.get(_module_name(path)), _OFFERED)


def attribute_of(
    module: ModuleType, name: str, key: str, wanted: Callable[[Any], bool], what: str
) -> Any:
    """Return the attribute `module.name`, which must satisfy `wanted`. `what` describes the
    expected kind in messages, for example "a function".

    Raises:
        ConfigError: the module has no such name, or its value is of the wrong kind; the message
            suggests the nearest name.
    """
    found = getattr(module, name, None)
    if wanted(found):
        return found
    defined = {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    own = sorted(key for key, value in defined.items() if wanted(value) and not key.startswith("_"))
    hint = did_you_mean(name, own)
    raise ConfigError(
        f"{module.__file__} ({key}): {name!r} is not {what}{hint} (it has: "
        f"{', '.join(own) or 'none'})"
    )


def describe_error(error: BaseException, path: Path) -> str:
    """Describe an error in user code by its type, its message and the line in the user's file; a
    HybridFlowError only by its message.
    """
    line = line_of(error, path)
    # the text of a SyntaxError already contains the line
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    said = text if isinstance(error, HybridFlowError) else f"{type(error).__name__}: {text}"
    return said + ("" if line is None else f" (line {line})")


def line_of(error: BaseException, path: Path) -> int | None:
    """Return the line number of the innermost frame in the user's file; None if the traceback does
    not include the file."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve() == path.resolve():
            lines.append(frame.lineno)
    return lines[-1] if lines else None
