"""Tools of real MCP servers: a program over its standard input and output, and one behind an
address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.agents import mcp_client
from hybridflow.agents.formats.base import Call
from hybridflow.agents.toolbox import toolbox
from hybridflow.agents.tools.base import Toolbox, ToolLostError
from hybridflow.config.check import problems
from hybridflow.config.schema import AgentConfig, RolloutConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.process.children import is_running

pytestmark = pytest.mark.slow  # starts servers

SERVER = """
import asyncio, os, sys
from mcp.server import MCPServer
server = MCPServer("tiny")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Add two numbers."
    return a + b

@server.tool()
async def hang() -> str:
    await asyncio.sleep(3600)

@server.tool()
def large(size: int) -> str:
    return "x" * size

@server.tool()
def environ() -> str:
    return repr(dict(os.environ))

@server.tool()
def die(code: int) -> str:
    os._exit(code)

@server.tool()
def noise() -> str:
    os.write(1, b"this is no message\\n")
    return "said"

@server.tool()
def fail() -> str:
    raise KeyError("no such thing")

@server.tool()
def pid() -> str:
    return str(os.getpid())
"""
# answers by hand, so that what is no UTF-8 can be sent: an answer to initialize, a list of one
# tool, a call
RAW = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, said = asked["method"], None
    if method == "initialize":
        said = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"}}
    elif method == "tools/list":
        said = {"tools": [{"name": "odd", "inputSchema": {"type": "object", "properties": {}}}]}
    elif method == "tools/call":
        said = {"content": [{"type": "text", "text": "MARK"}]}
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    answer |= {"result": said} if said else {"error": {"code": -32601, "message": "unknown"}}
    sys.stdout.buffer.write(json.dumps(answer).encode().replace(b"MARK", b"a\\xffb\\\\ud800c") + b"\\n")
    sys.stdout.buffer.flush()
"""
HTTP = (  # with a token
    SERVER
    + """
import socket
import uvicorn
app = server.streamable_http_app()

async def guarded(scope, receive, send):
    if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != b"Bearer open sesame":
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await app(scope, receive, send)

bound = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(bound.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(guarded, log_level="error")).run(sockets=[bound])
"""
)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    mcp_client.close_all()


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Toolbox]:
    def made(source: str = SERVER, timeout_s: float = 120.0, **settings: Any) -> Toolbox:
        (tmp_path / "server.py").write_text(
            source + ("\nserver.run()\n" if source is SERVER else "")
        )
        given = {
            "command": [sys.executable, str(tmp_path / "server.py")],
            "start_timeout_s": 300.0,
            **settings,
        }
        return toolbox(config(tmp_path, {"tiny": given}, tool_timeout_s=timeout_s))

    return made


def config(folder: Path, servers: dict[str, Any], **agent: Any) -> RunConfig:
    settings = AgentConfig(loop="tools", mcp_servers=servers, **agent)
    return RunConfig(output_dir=str(folder), rollout=RolloutConfig(agent=settings))


def result(tools: Toolbox, name: str, **arguments: Any) -> str:
    return asyncio.run(tools.results([Call(name, arguments)]))[0]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_policy_calls_tools_of_a_server_and_is_told_what_there_is(
    opened: Callable[..., Toolbox],
) -> None:
    tools = opened()
    declared = {one["function"]["name"]: one["function"] for one in tools.schemas()}
    assert declared["add"]["description"] == "Add two numbers."
    assert declared["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert result(tools, "add", a=40, b=2) == "42" and result(tools, "add", a=4) == "5"
    assert result(tools, "add", b=4) == "error: add: missing a required argument: 'a'"
    assert "unexpected keyword argument 'c'" in result(tools, "add", a=1, c=4)
    assert result(tools, "add", a="no number").startswith("error: ")
    assert result(tools, "fail") == "error: Error executing tool fail"  # all that this server says
    assert result(tools, "noise") == "said"


def test_only_the_tools_that_are_named_are_offered(opened: Callable[..., Toolbox]) -> None:
    assert list(opened(tools=["pid", "add"]).tools) == ["add", "pid"]
    with pytest.raises(
        ConfigError,
        match=r"mcp_servers.tiny.tools: the server offers no sub \(it offers: add, hang",
    ):
        opened(tools=["sub"])


def test_a_call_that_hangs_is_given_up_and_the_server_goes_on(
    opened: Callable[..., Toolbox],
) -> None:
    tools = opened(timeout_s=0.5, start_timeout_s=120)
    assert result(tools, "hang") == "error: hang did not return within 0.5 s"
    wait_until(lambda: result(tools, "add", a=1) == "2")


def test_large_results_are_cut_and_larger_ones_are_refused(opened: Callable[..., Toolbox]) -> None:
    tools = opened()
    assert result(tools, "large", size=10_000_000) == "x" * (1 << 16)
    with pytest.raises(
        ToolLostError,
        match=r"mcp_servers.tiny was lost during a call to large: .* larger than 67108864",
    ):
        result(tools, "large", size=40_000_000)
    assert result(tools, "add", a=1) == "2"  # it was started again


def test_what_is_no_text_is_shown_as_marks(opened: Callable[..., Toolbox]) -> None:
    assert result(opened(RAW), "odd") == "a�b?c"


def test_a_server_is_told_no_secret_but_those_that_are_named(
    opened: Callable[..., Toolbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HYBRIDFLOW_JOB_SECRET", "RAY_AUTH_TOKEN", "SOME_API_KEY", "NAMED"):
        monkeypatch.setenv(name, f"secret of {name}")
    said = result(opened(env=["NAMED", "HYBRIDFLOW_JOB_SECRET"]), "environ")
    assert "secret of NAMED" in said and "'PATH'" in said
    assert (
        "secret of SOME" not in said
        and "secret of HYBRIDFLOW" not in said
        and "secret of RAY" not in said
    )
    with pytest.raises(
        ConfigError,
        match=r"mcp_servers.tiny requires the environment variable UNSET, but it is not set",
    ):
        opened(env=["UNSET"])


def test_a_server_that_dies_costs_its_calls_and_is_started_again_within_the_limit(
    opened: Callable[..., Toolbox],
) -> None:
    tools = opened(max_restarts=2)
    for _ in range(2):
        before = result(tools, "pid")
        with pytest.raises(
            ToolLostError, match="was lost during a call to die: it exited with code 3"
        ):
            result(tools, "die", code=3)
        assert result(tools, "pid") != before
    with pytest.raises(ToolLostError, match="exited with code 4"):
        result(tools, "die", code=4)
    with pytest.raises(
        ToolLostError, match=r"cannot be used: it exited with code 4 \(restarted 2 times within"
    ):
        result(tools, "add", a=1)


def test_a_server_that_is_killed_between_calls_is_started_again(
    opened: Callable[..., Toolbox],
) -> None:
    tools = opened()
    before = int(result(tools, "pid"))
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not is_running(before))

    def answers() -> bool:
        try:
            return int(result(tools, "pid")) != before
        except ToolLostError:  # asked before anybody knew
            return False

    wait_until(answers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_program_ends_with_the_run(
    opened: Callable[..., Toolbox], tmp_path: Path, number: int
) -> None:
    (tmp_path / "server.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + SERVER
        + "\nserver.run()\nimport time\ntime.sleep(3600)\n"
    )
    driver = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.unit.agents.test_mcp import config, result, toolbox\n"
        "from hybridflow.process.stopping import terminate_as_interrupt\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with terminate_as_interrupt():\n"
        "    given = {'tiny': {'command': [sys.executable, str(folder / 'server.py')]}}\n"
        "    print(result(toolbox(config(folder, given)), 'pid'), flush=True)\n"
        "    time.sleep(600)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", driver],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.stdout is not None
    server = int(run.stdout.readline())
    assert is_running(server)
    run.send_signal(number)
    run.wait(120)
    run.stdout.close()
    wait_until(lambda: not is_running(server))


def test_a_server_that_cannot_be_used_is_named_at_the_start(
    opened: Callable[..., Toolbox], tmp_path: Path
) -> None:
    key = "rollout.agent.mcp_servers.tiny"
    with pytest.raises(ConfigError, match=rf"{key}: .*program 'no-such-program' not found"):
        opened(command=["no-such-program"])
    with pytest.raises(
        ConfigError, match=rf"{key}: the server cannot be used: it exited with code 7"
    ):
        opened("import sys\nsys.exit(7)")
    with pytest.raises(ConfigError, match=rf"{key} did not list its tools within 0.5 s"):
        opened("import time\ntime.sleep(600)", start_timeout_s=0.5)
    with pytest.raises(ConfigError, match=rf"{key}: the server offers no tools"):
        opened(
            RAW.replace(
                '"tools": [{"name": "odd", "inputSchema": {"type": "object", "properties": {}}}]',
                '"tools": []',
            )
        )
    twice = config(
        tmp_path,
        {name: {"command": [sys.executable, str(tmp_path / "server.py")]} for name in "ab"},
    )
    (tmp_path / "server.py").write_text(RAW)
    with pytest.raises(ConfigError, match="two tools are named odd"):
        toolbox(twice)
    assert (tmp_path / twice.name / "logs" / "mcp-a.log").exists()


def test_a_server_behind_an_address_is_given_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server_http.py").write_text(HTTP)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is for the addresses of other machines

    def start(port: int) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, str(tmp_path / "server_http.py"), str(port)]
        served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert served.stdout is not None
        return served, int(served.stdout.readline())

    served, port = start(0)
    settings = {
        "tiny": {
            "url": f"http://127.0.0.1:{port}/mcp",
            "token_env": "TINY_TOKEN",
            "max_restarts": 50,
        }
    }
    try:
        monkeypatch.setenv("TINY_TOKEN", "guessed")
        with pytest.raises(
            ConfigError, match=r"mcp_servers.tiny: the server cannot be used: .*401"
        ):
            toolbox(config(tmp_path, settings))
        monkeypatch.setenv("TINY_TOKEN", "open sesame")
        mcp_client.close_all()
        tools = toolbox(config(tmp_path, settings, tool_timeout_s=60.0))
        assert result(tools, "add", a=40, b=2) == "42"
        assert result(tools, "large", size=10_000_000) == "x" * (1 << 16)
        refused = result(tools, "large", size=40_000_000)
        assert refused.startswith("error: ") and "67108864" in refused
        assert result(tools, "add", a=1) == "2"
        served.kill()
        served.communicate()
        with pytest.raises(ToolLostError, match=r"mcp_servers.tiny was lost during a call to add"):
            result(tools, "add", a=1)
        served, _ = start(port)

        def answers() -> bool:
            try:
                return result(tools, "add", a=1) == "2"
            except ToolLostError:  # it has tried once more before the server listened
                return False

        wait_until(answers)
    finally:
        served.kill()
        served.communicate()


def test_settings_without_sense_are_refused(tmp_path: Path) -> None:
    def said(**servers: Any) -> str:
        return "\n".join(problems(config(tmp_path, servers), files=False))

    assert "mcp_servers.a requires either a command or a url" in said(a={})
    assert "mcp_servers.a requires either a command or a url" in said(
        a={"command": ["x"], "url": "http://h"}
    )
    assert "mcp_servers.a.url=ftp://h: expected an address" in said(a={"url": "ftp://h"})
    assert "did you mean rollout.agent.mcp_servers.a.command" in said(a={"comand": ["x"]})
    assert "mcp_servers.a.token_env=T requires a url" in said(
        a={"command": ["x"], "token_env": "T"}
    )
    assert "mcp_servers.a.max_restarts=-1" in said(a={"command": ["x"], "max_restarts": -1})
    assert "mcp_servers" not in said(
        a={"command": ["x"]}
    ) and "requires rollout.agent.tools" not in said(a={"command": ["x"]})
    assert json.dumps(said(a=3)).count("mcp_servers.a") == 1
