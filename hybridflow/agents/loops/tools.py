"""The agent loop for tools: runs the calls in each answer and shows the policy their results, until
an answer contains no calls.
"""

from __future__ import annotations

from hybridflow.agents.call_reading import while_others_go_on
from hybridflow.agents.conversation import Conversation
from hybridflow.agents.loops.base import agent_loop
from hybridflow.agents.tools.base import Toolbox


@agent_loop("tools")
async def tools(conversation: Conversation, tools: Toolbox) -> None:
    """Sample an answer, run its calls concurrently, show the results, and repeat."""
    while calls := await while_others_go_on(tools.calls, await conversation.answer()):
        conversation.calls += len(calls)
        conversation.observe(await tools.results(calls), calls)
