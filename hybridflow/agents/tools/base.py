"""The interface of a tool, the decorator that registers tools, and the execution of the calls in an
answer. Each built-in tool is defined in a file of the same name in this package. To use your own,
list them in `rollout.agent.tools`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hybridflow.agents.call_reading import read_calls
from hybridflow.agents.formats.base import FORMATS, Call
from hybridflow.config.build import build_options
from hybridflow.config.keys import TOOL
from hybridflow.config.registry import Registry
from hybridflow.config.schema import AgentConfig
from hybridflow.errors import ConfigError, HybridFlowError, did_you_mean

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_MOST_CHARACTERS = 1 << 16  # of a result, before it is truncated to tokens


class ToolLostError(HybridFlowError):
    """Raised if the process that runs a tool has exited. This is not the policy's fault, so the
    conversation that called the tool is discarded.
    """


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        name: the name that the policy uses in calls.
        function: accepts keyword arguments of type str, int, float or bool; its result is shown as
            text. It may be async; otherwise each call runs in its own thread.
        description: the first paragraph of the function's docstring, shown to the policy.
        is_instant: True if the function takes microseconds and cannot hang, so that it needs no
            thread.
        options: a frozen dataclass, if the tool has options. At the start of the run, `function` is
            then called once with the options in `rollout.agent.tool_options` and returns the
            function that the policy may call.
        declared: the JSON schema of its arguments; None derives it from the function's signature.
    """

    name: str
    function: Callable[..., Any]
    description: str
    is_instant: bool = False
    options: type | None = None
    declared: Mapping[str, Any] | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the tool's arguments."""
        if self.declared is not None:
            return tuple(self.declared.get("properties") or ())
        return tuple(inspect.signature(self.function).parameters)

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """Return a description of the first missing or unknown argument, or an empty string."""
        if self.declared is None:
            try:
                inspect.signature(self.function).bind(**arguments)
            except TypeError as error:
                return str(error)
            return ""
        missing = [name for name in self.declared.get("required") or () if name not in arguments]
        unknown = [name for name in arguments if name not in self.parameters]
        if missing:
            return f"missing a required argument: {missing[0]!r}"
        if unknown and self.declared.get("additionalProperties", False) is False:
            return f"got an unexpected keyword argument {unknown[0]!r}"
        return ""

    def schema(self) -> dict[str, Any]:
        """Return the tool's declaration in the format that chat templates expect."""
        if self.declared is not None:
            declared = {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.declared),
            }
            return {"type": "function", "function": declared}
        found = inspect.signature(self.function, eval_str=True).parameters.values()
        kinds = {one.name: {"type": _JSON_TYPES.get(one.annotation, "string")} for one in found}
        required = [one.name for one in found if one.default is inspect.Parameter.empty]
        parameters = {"type": "object", "properties": kinds, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS: Registry[Tool] = Registry(TOOL.kind, TOOL.package, "rollout.agent.tools")


def tool(
    name: str, *, is_instant: bool = False, options: type | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the tool with this name. `Tool` documents the function's signature."""
    return TOOLS.entry(
        name, lambda function: Tool(name, function, _description(function), is_instant, options)
    )


def _description(function: Callable[..., Any]) -> str:
    paragraph, _, _ = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    return paragraph.replace("\n", " ")


class Toolbox:
    """The tools of a run, and the format in which they are called.

    Args:
        offered: tools in addition to those in `rollout.agent.tools`.
        thinking_open: True if answers start inside a thinking block, because the prompt opens one.

    Raises:
        ConfigError: a tool or format does not exist, two tools have the same name, or a tool's
            options are invalid.
    """

    def __init__(
        self, config: AgentConfig, offered: Sequence[Tool] = (), *, thinking_open: bool = False
    ) -> None:
        self.tools: dict[str, Tool] = {}
        chosen = [_opened(TOOLS.get(name), config) for name in config.tools]
        for found in [*chosen, *offered]:
            if found.name in self.tools:
                raise ConfigError(
                    f"rollout.agent.tools: two tools are named {found.name}; remove one of them"
                )
            self.tools[found.name] = found
        FORMATS.get(config.call_format)
        self._format = config.call_format
        self._thinking_open = thinking_open
        self._declared = {
            name: found.schema()["function"]["parameters"] for name, found in self.tools.items()
        }
        self._timeout_s = config.tool_timeout_s
        self._at_a_time = config.max_parallel_calls

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools' declarations for chat templates."""
        return [found.schema() for found in self.tools.values()]

    def calls(self, answer: str) -> list[Call]:
        """Parse the calls in an answer, in order, ignoring its thinking. Arguments are converted to
        the types that the tools declare."""
        return read_calls(self._format, answer, self._declared, thinking_open=self._thinking_open)

    async def results(self, calls: Sequence[Call]) -> list[str]:
        """Run the calls and return their results, or errors, as text for the policy. Calls are
        started in order, and up to `rollout.agent.max_parallel_calls` run concurrently.

        Raises:
            ToolLostError: the process that runs one of the tools has exited. Pending calls are not
                started.
        """
        places = asyncio.Semaphore(self._at_a_time)

        async def placed(call: Call) -> str:
            async with places:
                return await self._result(call)

        tasks = [asyncio.ensure_future(placed(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _result(self, call: Call) -> str:
        problem = call.problem or self._problem(call)
        if problem:
            return f"error: {problem}"
        try:
            found = await asyncio.wait_for(
                _run(self.tools[call.name], call.arguments), self._timeout_s
            )
        except TimeoutError:
            return f"error: {call.name} did not return within {self._timeout_s:g} s"
        except ToolLostError:
            raise
        except (Exception, SystemExit) as error:  # the policy is shown any error of a tool
            found = f"error: {type(error).__name__}: {error}"
        text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        return text[:_MOST_CHARACTERS]

    def _problem(self, call: Call) -> str:
        if call.name not in self.tools:
            hint = did_you_mean(call.name, self.tools)
            return f"unknown tool {call.name!r}{hint} (available tools: {', '.join(self.tools)})"
        problem = self.tools[call.name].problem(call.arguments)
        return f"{call.name}: {problem}" if problem else ""


def _opened(found: Tool, config: AgentConfig) -> Tool:
    """Return the tool with its options applied."""
    key = f"rollout.agent.tool_options.{found.name}"
    given = config.tool_options.get(found.name, {})
    if found.options is None:
        if given:
            raise ConfigError(f"{key}: this tool accepts no options; remove them")
        return found
    function = found.function(build_options(found.options(), given, key))
    return dataclasses.replace(found, function=function, description=_description(function))


async def _run(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool.function):
        return await tool.function(**arguments)
    if tool.is_instant:
        return tool.function(**arguments)
    return await _in_thread(tool.function, arguments)


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Run a function in a daemon thread, so that a hung call does not block the exit of the
    process."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # cannot be cancelled: it continues after a timeout

    def run() -> None:
        try:
            done.set_result(function(**arguments))
        except SystemExit as ended:
            done.set_exception(RuntimeError(f"it called sys.exit({ended.code})"))
        except Exception as raised:
            done.set_exception(raised)

    threading.Thread(target=run, name=f"tool-{function.__name__}", daemon=True).start()
    return await asyncio.wrap_future(done)
