"""SPMD roles: thin worker classes with `@register`-ed methods. The methods are called by a worker
group, or directly by plain processes.
"""
