"""Conversations: a prompt becomes answers, tool calls and observations, token by token.

`conversation` stores the tokens, `loops` decide what happens between answers, `formats` parse tool
calls out of an answer, and `tools` implement them. The engines are reached through
`rollout.conversations`.
"""
