"""Weight transfer planning: decides which trainer rank sends which slice of each tensor to which
engine rank. The planner has no side effects.
"""
