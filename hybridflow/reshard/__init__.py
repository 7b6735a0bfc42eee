"""What piece of which tensor goes from which rank to whom. The planner is pure."""
