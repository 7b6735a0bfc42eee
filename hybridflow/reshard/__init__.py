"""Plans which slice of which tensor is sent from which trainer rank to which engine rank. The
planner is pure."""
