"""All tools of a run."""

from __future__ import annotations

from hybridflow.agents.tools.base import Toolbox
from hybridflow.config.schema import RunConfig


def toolbox(config: RunConfig, *, thinking_open: bool = False) -> Toolbox:
    """The tools of `rollout.agent.tools`, and those of `rollout.agent.mcp_servers`.

    Args:
        thinking_open: answers begin inside of a thinking.

    Raises:
        ConfigError: what `Toolbox` raises; a server of tools cannot be used.
    """
    if not config.rollout.agent.mcp_servers:
        return Toolbox(config.rollout.agent, thinking_open=thinking_open)
    from hybridflow.agents.mcp_client import offered  # it takes a second to import

    return Toolbox(config.rollout.agent, offered(config), thinking_open=thinking_open)
