"""The SPMD roles: thin classes whose methods are `@register`-ed for a worker group, and run as well under plain
processes."""
