"""Multi-turn conversations: token sequences of answers, tool calls and observations that continue a
prompt.

`conversation` stores the tokens, `loops` control what happens between answers, `formats` parse tool
calls in an answer, and `tools` implement the tools. Engines are accessed through
`rollout.conversations`.
"""
