"""`bench planner`: every way to use a cached prefix, timed over shaped links, and which the planner chooses."""
