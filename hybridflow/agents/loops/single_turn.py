"""The agent loop that samples a single answer per prompt."""

from __future__ import annotations

from hybridflow.agents.conversation import Conversation
from hybridflow.agents.loops.base import agent_loop
from hybridflow.agents.tools.base import Toolbox


@agent_loop("single_turn")
async def single_turn(conversation: Conversation, tools: Toolbox) -> None:
    """Sample one answer."""
    del tools
    await conversation.answer()
