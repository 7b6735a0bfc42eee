"""SPMD roles: thin worker classes whose `@register`-ed methods are called by a worker group or directly from plain
processes."""
