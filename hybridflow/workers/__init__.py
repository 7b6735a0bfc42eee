"""SPMD roles: thin worker classes with `@register`-ed methods.

A worker group calls the methods, or plain processes call them directly.
"""
