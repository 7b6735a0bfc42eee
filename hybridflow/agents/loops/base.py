"""What an agent loop is, and how one is registered.

A built-in loop is a file of this package that bears its name; one of a user's is named in `rollout.agent.loop`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hybridflow.agents.conversation import Conversation
from hybridflow.agents.tools.base import Toolbox
from hybridflow.config.keys import AGENT_LOOP
from hybridflow.config.registry import Registry

# async (conversation, tools) -> None: asks for answers and shows observations; the conversation ends when it returns
AgentLoop = Callable[[Conversation, Toolbox], Awaitable[None]]
LOOPS: Registry[AgentLoop] = Registry(AGENT_LOOP.kind, AGENT_LOOP.package, "rollout.agent.loop")


def agent_loop(name: str) -> Callable[[AgentLoop], AgentLoop]:
    """Register an async function (conversation, tools) as the agent loop of this name."""

    def registered(function: AgentLoop) -> AgentLoop:
        LOOPS.register(name, function)
        return function

    return registered
