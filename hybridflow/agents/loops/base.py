"""The interface of an agent loop and the decorator that registers loops. Each built-in loop is
defined in a file of the same name in this package. To use your own, set `rollout.agent.loop`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hybridflow.agents.conversation import Conversation
from hybridflow.agents.tools.base import Toolbox
from hybridflow.config.keys import AGENT_LOOP
from hybridflow.config.registry import Registry

# async (conversation, tools) -> None: samples answers and shows observations; the conversation ends
# when it returns
AgentFunction = Callable[[Conversation, Toolbox], Awaitable[None]]


@dataclass(frozen=True)
class AgentLoop:
    """A registered loop.

    Attributes:
        function: runs one conversation.
        gives_rewards: True if the loop calls `Conversation.reward`. A conversation's score is the
            sum of  these rewards, unless `reward.path` or `reward.combine` is set.
    """

    function: AgentFunction
    gives_rewards: bool = False


LOOPS: Registry[AgentLoop] = Registry(AGENT_LOOP.kind, AGENT_LOOP.package, "rollout.agent.loop")


def agent_loop(
    name: str, *, gives_rewards: bool = False
) -> Callable[[AgentFunction], AgentFunction]:
    """Register an async function (conversation, tools) as the agent loop with this name."""
    return LOOPS.entry(name, lambda function: AgentLoop(function, gives_rewards))
