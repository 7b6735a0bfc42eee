"""What an agent loop is, and how one is registered.

A built-in loop is a file of this package that bears its name; one of a user's is named in
`rollout.agent.loop`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hybridflow.agents.conversation import Conversation
from hybridflow.agents.tools.base import Toolbox
from hybridflow.config.keys import AGENT_LOOP
from hybridflow.config.registry import Registry

# async (conversation, tools) -> None: asks for answers and shows observations; the conversation
# ends when it returns
AgentFunction = Callable[[Conversation, Toolbox], Awaitable[None]]


@dataclass(frozen=True)
class AgentLoop:
    """A registered loop.

    Attributes:
        function: what happens between the answers.
        gives_rewards: it calls `Conversation.reward`; the score of a conversation is their sum
            unless `reward.path` or `reward.combine` says otherwise.
    """

    function: AgentFunction
    gives_rewards: bool = False


LOOPS: Registry[AgentLoop] = Registry(AGENT_LOOP.kind, AGENT_LOOP.package, "rollout.agent.loop")


def agent_loop(
    name: str, *, gives_rewards: bool = False
) -> Callable[[AgentFunction], AgentFunction]:
    """Register an async function (conversation, tools) as the agent loop of this name."""
    return LOOPS.entry(name, lambda function: AgentLoop(function, gives_rewards))
