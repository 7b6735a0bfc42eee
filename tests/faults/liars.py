"""Conversations whose MCP server lies in most of its answers and whose environment returns 100 MB:
programs for `kills.play`."""

from __future__ import annotations

from tests.faults.kills import ENVIRONMENT, LOSSES, Programs

# Which of its answers a server gives depends on the call alone, so a lie can be told from a loss.
LIES = (
    "the truth",
    "no JSON",
    "content of another type",
    "an error without a message",
    "a line of 70 MB",
    "an answer to a call that nobody made, and then the truth",
    "a request of its own, and then the truth",
    "1,000 notifications, and then the truth",
    "no answer",
)
_SERVER = """
import json, sys
TOOL = {"name": "tally", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}

def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked or "method" not in asked:
        continue
    answer = {"id": asked["id"]}
    if asked["method"] == "initialize":
        answer["result"] = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                            "serverInfo": {"name": "tally", "version": "1"}}
    elif asked["method"] == "tools/list":
        answer["result"] = {"tools": [TOOL]}
    elif asked["method"] == "tools/call":
        number = sum(map(ord, asked["params"]["arguments"]["text"]))
        lie = number % 9
        answer["result"] = {"content": [{"type": "text", "text": str(number)}]}
        if lie == 1:
            print("{this is no JSON", flush=True)
            continue
        if lie == 2:
            answer["result"] = {"content": 7}
        if lie == 3:
            answer = {"id": asked["id"], "error": {}}
        if number % 45 == 4:  # ends the connection, and with it all calls that are under way
            answer["result"]["content"][0]["text"] = "x" * (70 << 20)
        if lie == 5:
            say({"id": 10**6, "result": {"content": []}})
        if lie == 6:
            say({"id": "mine", "method": "sampling/createMessage", "params": {}})
        if lie == 7:
            for part in range(1000):
                say({"method": "notifications/message", "params": {"level": "info", "data": part}})
        if lie == 8:
            continue
    else:
        answer["error"] = {"code": -32601, "message": "unknown"}
    say(answer)
"""
LYING_SERVER = Programs(
    "lying MCP server",
    server=_SERVER,
    tool_timeout_s=2.0,
    # an observation may also be what the policy is told of a lie
    allowed=r"error: ",
    losses=LOSSES + r"|tally",
)
LARGE_ENVIRONMENT = Programs(
    "environment that returns 100 MB",
    environment=ENVIRONMENT.replace(
        "return Step(str(self.seen)",
        'return Step("x" * (100 << 20) if self.seen % 7 == 3 else str(self.seen)',
    ),
    allowed=r"x{100,}$",
)
