"""Rollout engines: what one is (`base`), its restarts (`supervisor`), several nodes (`nodes`); one
package for each kind.

Importing this package imports neither torch nor a kind's library: SGLang itself imports it (entry
points) very early in each of its processes.
"""
