"""The reference of the Python interface, from the sources. Nothing is imported but the list of
names, so that neither torch nor Ray is needed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import hybridflow

ROOT = Path(__file__).resolve().parents[1]
_HEAD = """\
# Python interface

The names of `import hybridflow as hf`. Importing the package loads neither torch nor Ray; each name is loaded on first
use. [A run from Python](../python.md) shows how `hf.Run` is used, [Flows](../flows.md) the calls of an algorithm, and
[CONTRIBUTING.md](../../CONTRIBUTING.md) an example of every decorator.

This page is generated from the docstrings by `python -m website write`.
"""
_ORDER = ("Run", "flow", "estimator", "policy_loss", "verifier", "tool", "environment")
_ORDER += ("agent_loop", "tracker", "DataProto", "Jagged", "HybridFlowError")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def document() -> str:
    """Return the page: one section per public name."""
    modules = hybridflow._MODULES
    if missing := set(modules) ^ set(_ORDER):
        raise ValueError(f"_ORDER and hybridflow._MODULES differ in {sorted(missing)}")
    lines = [_HEAD]
    for name in _ORDER:
        node = find(name, modules[name])
        lines += [f"## hf.{name}", ""]
        if isinstance(node, ast.ClassDef):
            lines += _class(node)
            lines += _attributes_of_run() if name == "Run" else []
            lines += _errors() if name == "HybridFlowError" else []
        else:
            lines += _function(node, f"hf.{name}")
    return "\n".join(lines).rstrip() + "\n"


def find(name: str, module: str) -> ast.ClassDef | _Function:
    """Return the definition of a name, following re-exports. Raises KeyError if there is none."""
    for node in _tree(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name == name:
                return node
        elif isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return find(name, str(node.module))
    raise KeyError(f"{module} does not define {name}")


def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _class(node: ast.ClassDef) -> Iterator[str]:
    methods = [one for one in node.body if isinstance(one, _Function)]
    for method in methods:
        if method.name == "__init__":
            yield from _signature(f"hf.{node.name}", method, skip=1)
    yield from _docstring(node)
    for method in methods:
        if not method.name.startswith("_"):
            yield from _member(method)


def _member(method: _Function) -> Iterator[str]:
    decorators = {ast.unparse(one) for one in method.decorator_list}
    yield from (f"### {method.name}", "")
    if decorators & {"property", "functools.cached_property", "cached_property"}:
        returns = f": {ast.unparse(method.returns)}" if method.returns else ""
        yield from ("```python", f"{method.name}{returns}", "```", "")
    else:
        yield from _signature(method.name, method, skip=int("staticmethod" not in decorators))
    yield from _docstring(method)


def _function(node: _Function, name: str) -> Iterator[str]:
    yield from _signature(name, node, skip=0)
    yield from _docstring(node)


def _signature(name: str, node: _Function, skip: int) -> Iterator[str]:
    """Yield a code block with the signature: on one line if it fits, else an argument a line."""
    arguments = _arguments(node.args)[skip:]
    returns = "" if node.returns is None or name.startswith("hf.R") else ast.unparse(node.returns)
    arrow = f" -> {returns}" if returns else ""
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{prefix}{name}({', '.join(arguments)}){arrow}"
    yield "```python"
    if len(line) <= 88:
        yield line
    else:
        yield f"{prefix}{name}("
        yield from (f"    {argument}," for argument in arguments)
        yield f"){arrow}"
    yield from ("```", "")


def _arguments(args: ast.arguments) -> list[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    found = [
        _argument(one, value) for one, value in zip(plain, [*defaults, *args.defaults], strict=True)
    ]
    if args.vararg:
        found.append(f"*{_argument(args.vararg, None)}")
    elif args.kwonlyargs:
        found.append("*")
    found += [_argument(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        found.append(f"**{_argument(args.kwarg, None)}")
    return found


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    equals = "="
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
        equals = " = "
    return text if default is None else f"{text}{equals}{ast.unparse(default)}"


def _docstring(node: ast.ClassDef | _Function) -> Iterator[str]:
    """Yield the paragraphs. `Args:` and the like become lists."""
    text = ast.get_docstring(node)
    if not text:
        return
    for block in text.split("\n\n"):
        first, _, rest = block.partition("\n")
        if first in ("Args:", "Raises:", "Returns:", "Yields:") and rest:
            yield from (f"**{first.removesuffix(':')}**", "", *_items(rest.splitlines()), "")
        else:
            yield from (*block.splitlines(), "")


def _items(lines: Sequence[str]) -> Iterator[str]:
    for line in inspect.cleandoc("\n".join(lines)).splitlines():
        name, colon, meaning = line.partition(":")
        if not line.startswith(" ") and colon:
            yield f"- `{name}`:{meaning}"
        else:
            yield f"  {line.strip()}"


def _attributes_of_run() -> list[str]:
    """Return the section of a run's roles, which are attributes."""
    node = find("Role", "hybridflow.api.run")
    assert isinstance(node, ast.ClassDef)
    head = "### policy, critic, reference, reward_model, teacher, roles"
    about = (
        "The roles of a step by hand (`steps_by_hand`). `roles` holds additional policies by name."
    )
    members = [line.replace("### ", "#### ", 1) for line in _class(node)]
    return [head, "", about, "", *members]


def _errors() -> Iterator[str]:
    """Yield a table of the errors that a program may catch."""
    yield from ("| Error | Meaning |", "|---|---|")
    for node in _tree("hybridflow.errors").body:
        if isinstance(node, ast.ClassDef) and node.name != "HybridFlowError":
            about = " ".join((ast.get_docstring(node) or "").split())
            yield f"| `hybridflow.errors.{node.name}` | {about.replace('|', chr(92) + '|')} |"
    yield ""
