"""Loading a user's reward function from a python file, checked before the first rollout rather than after it."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_function(config: RewardConfig) -> Callable[..., Any]:
    """The function `reward.name` of the file `reward.path`, sync or async.

    Raises:
        ConfigError: the file is missing or fails to import, has no such function, or the function does not take the
        arguments
            data_source, solution_str, ground_truth, extra_info and those of reward.kwargs.
    """
    assert config.path is not None
    path = Path(config.path)
    if not path.is_file():
        raise ConfigError(f"reward.path {config.path!r} is no file (looked in {Path.cwd()})")
    module = _import_file(path)
    function = getattr(module, config.name, None)
    if function is None:
        raise ConfigError(f"{path} has no function {config.name!r} (reward.name){_functions_hint(module, config.name)}")
    if not callable(function):
        raise ConfigError(f"{path}: {config.name!r} (reward.name) is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {config.name}{inspect.signature(function)} cannot be called with {', '.join(ARGUMENTS)}"
            f"{''.join(f', {key}' for key in config.kwargs)} by name: {error}"
        ) from error
    return function


def _import_file(path: Path) -> ModuleType:
    """Runs the file as a module of its own; its name holds a hash of the path so that two files of one name do not
    meet."""
    name = f"hybridflow_reward_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.path {str(path)!r} is not a python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling in the user's file look their own module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise ConfigError(f"{path} (reward.path) cannot be imported: {describe_error(error, path)}") from error
    return module


def describe_error(error: BaseException, path: Path) -> str:
    """Type and message of an error in user code, with the line of the user's file it came from."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


def _functions_hint(module: ModuleType, name: str) -> str:
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    close = difflib.get_close_matches(name, functions, n=1)
    did_you_mean = f"; did you mean {close[0]!r}?" if close else ""
    return f"{did_you_mean} (it has: {', '.join(sorted(functions)) or 'none'})"
