"""The agent loop for environments: answers and observations alternate until the episode is over."""

from __future__ import annotations

from hybridflow.agents.conversation import Conversation
from hybridflow.agents.loops.base import agent_loop
from hybridflow.agents.tools.base import Toolbox


@agent_loop("environment", gives_rewards=True)
async def environment(conversation: Conversation, tools: Toolbox) -> None:
    """Sample an answer, pass it to the environment's `step`, show the observation, and repeat."""
    del tools
    async with conversation.episode() as episode:
        while True:
            step = await episode.step(await conversation.answer())
            conversation.reward(step.reward)
            if step.done:
                return
            conversation.observe([step.observation])
