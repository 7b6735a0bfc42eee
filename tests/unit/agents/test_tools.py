"""Tools: what the policy is told when a call succeeds, and whatever else may happen to it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.agents.formats.base import Call
from hybridflow.agents.tools import python
from hybridflow.agents.tools.base import Toolbox, ToolLostError
from hybridflow.agents.tools.calculator import calculator
from hybridflow.config.schema import AgentConfig
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.process.children import is_running
from hybridflow.rewards.sandbox import Sandbox

OWN = '''
import sys, threading, asyncio
from hybridflow.agents.tools.base import tool

@tool("greet")
def greet(name: str, times: int = 1) -> str:
    """Greet somebody.

    Not for the model."""
    return f"hello {name} " * times

@tool("hang")
async def hang() -> str:
    await asyncio.Event().wait()

@tool("leave")
def leave() -> str:
    sys.exit(3)

@tool("fail")
def fail() -> str:
    raise KeyError("no such thing")

@tool("large")
def large() -> bytes:
    return b"\\xff" + b"x" * 10_000_000

@tool("where")
def where() -> str:
    return threading.current_thread().name
'''


@pytest.fixture
def toolbox(tmp_path: Path) -> Callable[..., Toolbox]:
    (tmp_path / "own.py").write_text(OWN)

    def made(*names: str, **settings: Any) -> Toolbox:
        return Toolbox(
            AgentConfig(tools=tuple(f"{tmp_path}/own.py:{name}" for name in names), **settings)
        )

    return made


def results(tools: Toolbox, *calls: Call) -> list[str]:
    return asyncio.run(tools.results(calls))


def test_a_call_returns_text_and_the_model_is_told_what_there_is(
    toolbox: Callable[..., Toolbox],
) -> None:
    tools = toolbox("greet", "where")
    assert results(tools, Call("greet", {"name": "you", "times": 2}), Call("where")) == [
        "hello you hello you ",
        "tool-where",
    ]
    function = tools.schemas()[0]["function"]
    assert (function["name"], function["description"]) == ("greet", "Greet somebody.")
    assert function["parameters"]["properties"] == {
        "name": {"type": "string"},
        "times": {"type": "integer"},
    }
    assert function["parameters"]["required"] == ["name"]


def test_whatever_goes_wrong_the_policy_is_told(toolbox: Callable[..., Toolbox]) -> None:
    tools = toolbox("greet", "leave", "fail", "large")
    unknown, missing, unreadable, left, failed, large = results(
        tools,
        Call("gret", {"name": "you"}),
        Call("greet", {"nam": "you"}),
        Call("", problem="the call is not valid JSON"),
        Call("leave"),
        Call("fail"),
        Call("large"),
    )
    assert "unknown tool 'gret'; did you mean greet?" in unknown
    assert "greet: missing a required argument: 'name'" in missing
    assert unreadable == "error: the call is not valid JSON"
    assert "sys.exit(3)" in left and "KeyError: 'no such thing'" in failed
    assert large.startswith("�x") and len(large) == 1 << 16


@pytest.mark.slow
def test_a_tool_that_hangs_is_given_up(toolbox: Callable[..., Toolbox]) -> None:
    tools = toolbox("hang", "greet", tool_timeout_s=2.0)
    assert results(tools, Call("hang"), Call("greet", {"name": "you"})) == [
        "error: hang did not return within 2 s",
        "hello you ",
    ]


@pytest.mark.parametrize(("most", "number"), [(4, 1000), (16, 3)])
def test_so_many_calls_of_an_answer_run_at_a_time(tmp_path: Path, most: int, number: int) -> None:
    (tmp_path / "counts.py").write_text(
        "import asyncio\nfrom hybridflow.agents.tools.base import tool\nrunning, seen = [], "
        "[]\n@tool('count')\n"
        "async def count(n: int) -> str:\n    running.append(n)\n    seen.append(len(running))\n"
        "    await asyncio.sleep(0)\n    running.remove(n)\n    return str(n)\n"
    )
    tools = Toolbox(AgentConfig(tools=(f"{tmp_path}/counts.py:count",), max_parallel_calls=most))
    assert results(tools, *(Call("count", {"n": n}) for n in range(number))) == [
        str(n) for n in range(number)
    ]
    assert max(tools.tools["count"].function.__globals__["seen"]) == min(most, number)


def test_no_further_call_starts_once_a_tool_is_lost(tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(
        "from hybridflow.agents.tools.base import ToolLostError, tool\nasked = []\n@tool('lost')\n"
        "async def lost(n: int) -> str:\n    asked.append(n)\n    raise ToolLostError('gone')\n"
    )
    tools = Toolbox(AgentConfig(tools=(f"{tmp_path}/lost.py:lost",), max_parallel_calls=2))

    async def ask() -> None:
        with pytest.raises(ToolLostError):
            await tools.results([Call("lost", {"n": n}) for n in range(100)])
        await asyncio.sleep(0.01)

    asyncio.run(ask())
    assert len(tools.tools["lost"].function.__globals__["asked"]) < 10


def test_a_thread_that_ends_after_the_deadline_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import threading\nfrom hybridflow.agents.tools.base import tool\ngate, ended = "
        "threading.Event(), []\n"
        "@tool('slow')\ndef slow() -> str:\n    gate.wait(60)\n    ended.append(1)\n    return "
        "'late'\n"
    )
    tools = Toolbox(AgentConfig(tools=(f"{tmp_path}/slow.py:slow",), tool_timeout_s=0.1))
    assert results(tools, Call("slow")) == ["error: slow did not return within 0.1 s"]
    module = tools.tools["slow"].function.__globals__
    waiting = [thread for thread in threading.enumerate() if thread.name == "tool-slow"]
    module["gate"].set()
    for thread in waiting:
        thread.join(60)
    assert module["ended"] == [1]


def test_an_unknown_tool_or_format_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.agent.tools=calculater: .* did you mean 'calculator'"
    ):
        Toolbox(AgentConfig(tools=("calculater",)))
    with pytest.raises(
        ConfigError, match=r"rollout.agent.call_format=herms: .* did you mean 'hermes'"
    ):
        Toolbox(AgentConfig(call_format="herms"))


@given(
    st.recursive(
        st.integers(0, 999), lambda x: st.tuples(x, st.sampled_from("+-*"), x), max_leaves=12
    )
)
def test_the_calculator_computes_as_fractions_do(tree: Any) -> None:
    def written(node: Any) -> str:
        return (
            str(node)
            if isinstance(node, int)
            else f"({written(node[0])}{node[1]}{written(node[2])})"
        )

    def value(node: Any) -> Fraction:
        if isinstance(node, int):
            return Fraction(node)
        a = value(node[0])
        b = value(node[2])
        return a + b if node[1] == "+" else a - b if node[1] == "-" else a * b

    assert calculator(written(tree)) == str(value(tree))


def test_the_calculator_divides_and_raises_to_powers() -> None:
    assert (
        calculator(" 7 / 2 "),
        calculator("8/4"),
        calculator("-2**10"),
        calculator("7 // 2 % 2"),
    ) == (
        "3.5",
        "2",
        "-1024",
        "1",
    )


@pytest.mark.parametrize(
    "expression", ["", "1+", "x", "().__class__", "'a'*9", "1<2", "True+1", "9**9**9", "9**99999999", "(-1)**0.5",
                   "1e99*1e99", "f(1)", "[1]", "1" * 300, "(" * 150, "\0", "1e999"]
)  # fmt: skip
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(expression)
    tools = Toolbox(AgentConfig(tools=("calculator",)))
    assert results(tools, Call("calculator", {"expression": expression}))[0].startswith("error: ")


def _says(tools: Toolbox, code: str) -> str:
    return results(tools, Call("python", {"code": code}))[0]


@pytest.fixture
def sandboxed() -> Toolbox:
    try:
        Sandbox().close()
    except ResourceError as error:
        pytest.skip(str(error))
    return Toolbox(AgentConfig(tools=("python",)))


def test_programs_run_one_after_another_in_one_sandbox(sandboxed: Toolbox) -> None:
    """A call has a thread of its own, with which the sandbox must not end."""
    assert [_says(sandboxed, f"print({number})") for number in range(4)] == [
        "0\n",
        "1\n",
        "2\n",
        "3\n",
    ]
    assert _says(sandboxed, "1/0").startswith("error: Traceback")
    (kept,) = python._idle
    assert is_running(kept._process.pid)


def test_sandboxes_that_were_killed_cost_no_call(sandboxed: Toolbox) -> None:
    for sandbox in python._idle:
        sandbox.close()
    python._idle[:] = [Sandbox(), Sandbox(), Sandbox()]
    for sandbox in python._idle:
        os.kill(sandbox._process.pid, signal.SIGKILL)
    assert _says(sandboxed, "print(2)") == "2\n"
