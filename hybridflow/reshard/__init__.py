"""Weight transfer planning: determines which trainer rank sends which slice of a tensor to which
engine rank. The planner has no side effects."""
