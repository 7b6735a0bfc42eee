"""Answers that may call tools, which are shown what the tools return, until one calls none."""

from __future__ import annotations

from hybridflow.agents.call_reading import while_others_go_on
from hybridflow.agents.conversation import Conversation
from hybridflow.agents.loops.base import agent_loop
from hybridflow.agents.tools.base import Toolbox


@agent_loop("tools")
async def tools(conversation: Conversation, tools: Toolbox) -> None:
    """Ask, run the calls of the answer at the same time, show their results, and ask again."""
    while calls := await while_others_go_on(tools.calls, await conversation.answer()):
        conversation.calls += len(calls)
        conversation.observe(await tools.results(calls), calls)
