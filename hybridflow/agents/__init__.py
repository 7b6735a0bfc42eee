"""Conversations: how a prompt becomes answers, calls of tools and observations, token by token.

`conversation` holds the tokens, `loops` say what happens between them, `formats` read calls out of
an answer, `tools` are what is called. The engines are reached through `rollout.conversations`.
"""
