"""Checks of the settings for multi-turn conversations, tools and MCP servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridflow.config.build import build_options
from hybridflow.config.keys import NonNegativeInt, Positive, out_of_range
from hybridflow.config.registry import is_user_entry
from hybridflow.config.schema import AgentConfig, RunConfig
from hybridflow.errors import ConfigError

_KEY = "rollout.agent.mcp_servers"


@dataclass(frozen=True)
class McpServer:
    """An entry of `rollout.agent.mcp_servers`.

    Attributes:
        command: program and arguments of a server that communicates over stdin and stdout.
        env: names of driver environment variables to pass to this server, in addition to PATH, HOME
            and the like.
        url: address of a server that communicates over streamable HTTP.
        token_env: name of the driver's environment variable that contains the bearer token for
            `url`.
        tools: tools that the policy may call; empty allows all.
        start_timeout_s: timeout for starting the server and listing its tools.
        max_restarts: maximum number of restarts per hour.
    """

    command: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    url: str | None = None
    token_env: str | None = None
    tools: tuple[str, ...] = ()
    start_timeout_s: Positive = 60.0
    max_restarts: NonNegativeInt = 10


def mcp_servers(agent: AgentConfig) -> dict[str, McpServer]:
    """Return the servers keyed by name. Raises ConfigError if a key is unknown or of the wrong
    type."""
    given = agent.mcp_servers.items()
    servers: dict[str, McpServer] = {}
    for name, server in given:
        servers[str(name)] = build_options(McpServer(), server, f"{_KEY}.{name}")
    return servers


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each problem with `rollout.agent`."""
    agent = config.rollout.agent
    if agent.loop == "environment" and agent.environment is None:
        yield (
            "rollout.agent.loop=environment requires rollout.agent.environment; set one, for "
            "example guess"
        )
    if agent.loop in ("single_turn", "tools") and agent.environment is not None:
        yield (
            f"rollout.agent.environment={agent.environment} has no effect with "
            f"rollout.agent.loop={agent.loop}; set rollout.agent.loop=environment"
        )
    yield from _option_problems(agent)
    yield from _server_problems(agent)
    if agent.loop == "single_turn":
        if agent.tools or agent.mcp_servers:
            names = (
                f"tools={','.join(agent.tools)}"
                if agent.tools
                else f"mcp_servers={','.join(agent.mcp_servers)}"
            )
            yield (
                f"rollout.agent.{names} has no effect with rollout.agent.loop=single_turn, because "
                "that loop calls no tools; set rollout.agent.loop=tools"
            )
        return
    if agent.loop == "tools" and not agent.tools and not agent.mcp_servers:
        yield (
            "rollout.agent.loop=tools requires rollout.agent.tools; list at least one, for example "
            "[calculator]"
        )


def _option_problems(agent: AgentConfig) -> Iterator[str]:
    names = [name.rpartition(":")[2] if is_user_entry(name) else name for name in agent.tools]
    for name, given in agent.tool_options.items():
        if name not in names:
            yield (
                f"rollout.agent.tool_options.{name}: rollout.agent.tools does not contain {name} "
                f"(it contains: {', '.join(names) or 'none'})"
            )
        elif not isinstance(given, dict):
            yield f"rollout.agent.tool_options.{name}={given!r}: expected a group of options"


def _server_problems(agent: AgentConfig) -> Iterator[str]:
    try:
        servers = mcp_servers(agent)
    except ConfigError as error:
        yield str(error)
        return
    for name, server in servers.items():
        key = f"{_KEY}.{name}"
        if bool(server.command) == (server.url is not None):
            yield f"{key} requires either a command or a url"
        elif server.url is not None and not server.url.startswith(("http://", "https://")):
            yield (
                f"{key}.url={server.url}: expected an address that begins with http:// or https://"
            )
        if server.token_env is not None and server.url is None:
            yield (
                f"{key}.token_env={server.token_env} requires a url; for a command, use {key}.env "
                "to list the variables that it may read"
            )
        if server.env and server.url is not None:
            yield f"{key}.env requires a command; for a url, set the token with {key}.token_env"
        yield from (f"{key}.{line}" for line in out_of_range(server))
