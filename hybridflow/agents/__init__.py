"""Multi-turn conversations: a prompt followed by answers, tool calls and observations, all stored
as tokens.

`conversation` stores the tokens, `loops` control what happens between answers, `formats` parse tool
calls in an answer, and `tools` implement the tools. Engines are accessed through
`rollout.conversations`.
"""
