"""Construction of a run's toolbox from its configuration."""

from __future__ import annotations

from hybridflow.agents.tools.base import Toolbox
from hybridflow.config.schema import RunConfig


def toolbox(config: RunConfig, *, thinking_open: bool = False) -> Toolbox:
    """Return the tools listed in `rollout.agent.tools` and those offered by the servers in
    `rollout.agent.mcp_servers`.

    Args:
        thinking_open: True if answers start inside a thinking block.

    Raises:
        ConfigError: an MCP server cannot be used, or a configured tool or format is invalid.
    """
    if not config.rollout.agent.mcp_servers:
        return Toolbox(config.rollout.agent, thinking_open=thinking_open)
    from hybridflow.agents.mcp_client import offered  # the import takes a second

    return Toolbox(config.rollout.agent, offered(config), thinking_open=thinking_open)
